"""One tiny random checkpoint for each family and each of its options, made by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_SMALL_WINDOW = {"sliding_window": 7}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "rope_theta": 10000.0,
}
_DEEPSEEK = {
    "num_key_value_heads": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
}
_INDEXER = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 5}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6}
_NEMOTRON = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 6,
    "n_groups": 2,
    # Of transformers' prompts alone.
    "time_step_min": 1e-30,
}
#: By family, the class of transformers and what its options are in each variant: off first, then on.
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        [
            {},
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
            {"rope_parameters": _YARN},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        ],
    ),
    "MistralForCausalLM": ("MistralConfig", [_SMALL_WINDOW, {"sliding_window": None}]),
    "Qwen2ForCausalLM": ("Qwen2Config", [{}, _QWEN_WINDOW]),
    "Qwen3ForCausalLM": ("Qwen3Config", [{"head_dim": 16}, _QWEN_WINDOW | {"head_dim": 8, "attention_bias": True}]),
    "GemmaForCausalLM": ("GemmaConfig", [{"head_dim": 16}, {"head_dim": 8, "attention_bias": True}]),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        [
            _SMALL_WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 12, "final_logit_softcapping": 3.0},
            {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        ],
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        [
            _SMALL_WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
            {
                "head_dim": 8,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "layer_types": ["full_attention", "sliding_attention"],
                "final_logit_softcapping": 3.0,
            },
        ],
    ),
    "Phi3ForCausalLM": (
        "Phi3Config",
        [
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
            {"original_max_position_embeddings": 128, "rope_parameters": _LONGROPE},
            {"original_max_position_embeddings": 16, "rope_parameters": _LONGROPE, "sliding_window": 9},
        ],
    ),
    "GraniteForCausalLM": (
        "GraniteConfig",
        [
            {},
            {
                "embedding_multiplier": 12.0,
                "logits_scaling": 6.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.1,
                "mlp_bias": True,
                "attention_bias": True,
            },
        ],
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", [{}, {"attention_bias": True, "tie_word_embeddings": True}]),
    "Olmo3ForCausalLM": (
        "Olmo3Config",
        [
            _SMALL_WINDOW | {"attention_bias": True},
            _SMALL_WINDOW
            | {
                "rope_parameters": {
                    "full_attention": _YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "layer_types": ["full_attention", "sliding_attention"],
                "tie_word_embeddings": True,
            },
        ],
    ),
    "GlmForCausalLM": ("GlmConfig", [{"head_dim": 8}, {"head_dim": 16, "attention_bias": False}]),
    "Glm4ForCausalLM": ("Glm4Config", [{"head_dim": 8, "attention_bias": False}, {"head_dim": 16}]),
    "SeedOssForCausalLM": (
        "SeedOssConfig",
        [
            {"head_dim": 8},
            {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        ],
    ),
    "SmolLM3ForCausalLM": (
        "SmolLM3Config",
        [{"no_rope_layer_interval": 2}, {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 1]}],
    ),
    "CohereForCausalLM": ("CohereConfig", [{}, {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3}]),
    "Starcoder2ForCausalLM": ("Starcoder2Config", [{}, {"use_bias": False, "sliding_window": 7}]),
    "GPTNeoXForCausalLM": (
        "GPTNeoXConfig",
        [{}, {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 9000}],
    ),
    "GPT2LMHeadModel": ("GPT2Config", [{}, {"n_inner": 40, "activation_function": "relu"}]),
    "BloomForCausalLM": ("BloomConfig", [{}, {"num_attention_heads": 2}]),
    "FalconForCausalLM": (
        "FalconConfig",
        [
            {},
            {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 48},
        ],
    ),
    "MixtralForCausalLM": ("MixtralConfig", [{"num_local_experts": 6}, _SMALL_WINDOW | {"num_experts_per_tok": 3}]),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        [
            _EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
            _EXPERTS | {"head_dim": 8, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7},
        ],
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        [
            _EXPERTS | {"shared_expert_intermediate_size": 40},
            _EXPERTS | _QWEN_WINDOW | {"shared_expert_intermediate_size": 8, "qkv_bias": False, "norm_topk_prob": True},
        ],
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        [
            _SMALL_WINDOW | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
            {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8, "rope_parameters": {"rope_theta": 1e4}},
        ],
    ),
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config",
        [
            _DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1},
            _DEEPSEEK
            | {
                "topk_method": "group_limited_greedy",
                "routed_scaling_factor": 3.0,
                "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
            },
        ],
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        [
            _DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
            _DEEPSEEK
            | {
                "first_k_dense_replace": 1,
                "attention_bias": True,
                "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
            },
        ],
    ),
    "DeepseekV32ForCausalLM": (
        "DeepseekV32Config",
        [
            _DEEPSEEK | _INDEXER | {"first_k_dense_replace": 1, "rope_parameters": _YARN | {"mscale_all_dim": 1.0}},
            _DEEPSEEK | _INDEXER | {"first_k_dense_replace": 0, "index_topk": 200, "norm_topk_prob": False},
        ],
    ),
    "Lfm2ForCausalLM": (
        "Lfm2Config",
        [
            {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
            {
                "layer_types": ["full_attention", "conv"],
                "conv_bias": True,
                "conv_L_cache": 4,
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
        ],
    ),
}
CASES |= {
    "BambaForCausalLM": (
        "BambaConfig",
        [
            _MAMBA | {"attn_layer_indices": [1]},
            _MAMBA
            | {"attn_layer_indices": [0], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
            | {"mamba_conv_bias": False, "mamba_d_head": "auto", "time_step_limit": (0.3, 0.8)},
        ],
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        [
            _MAMBA
            | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0}
            | {"shared_intermediate_size": 40, "mamba_n_groups": 1},
            _MAMBA
            | {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 6, "num_experts_per_tok": 3}
            | {"shared_intermediate_size": 40, "position_embedding_type": "rope", "attention_multiplier": 0.3}
            | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
        ],
    ),
    "FalconH1ForCausalLM": (
        "FalconH1Config",
        [
            _MAMBA | {"mamba_d_ssm": 64},
            _MAMBA
            | {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_rms_norm": True, "projectors_bias": True}
            | {"mamba_norm_before_gate": False, "key_multiplier": 0.4, "lm_head_multiplier": 0.5}
            | {"embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 1.4], "attention_in_multiplier": 1.5}
            | {"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
            | {"ssm_multipliers": [0.5, 0.8, 1.2, 1.5, 0.7]},
        ],
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        [
            _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
            _NEMOTRON
            | {"layers_block_type": ["full_attention", "moe", "linear_attention", "mlp"], "n_routed_experts": 6}
            | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
            | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "mlp_bias": False, "use_conv_bias": False},
        ],
    ),
}
#: Sizes that a class does not know; it would write them down all the same.
ABSENT = {
    "GPTNeoXForCausalLM": ("num_key_value_heads",),
    "GPT2LMHeadModel": ("num_key_value_heads", "intermediate_size"),
    "BloomForCausalLM": ("num_key_value_heads", "intermediate_size"),
    "FalconForCausalLM": ("num_key_value_heads", "intermediate_size"),
}
_NORMS = tuple(f"{name}.weight" for name in ("norm", "layernorm", "ln_1", "ln_2", "ln_f", "ln_attn", "ln_mlp"))
VARIANTS = [(architecture, index) for architecture, (_, options) in CASES.items() for index in range(len(options))]


def write_checkpoint(folder: Path, architecture: str, variant: int, seed: int, **sizes: Any) -> Path:
    """Writes a checkpoint as transformers saves it, with weights large enough that every option shows."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, variants = CASES[architecture]
    absent = ABSENT.get(architecture, ())
    common = {key: value for key, value in (SIZES | sizes).items() if key not in absent}
    options = common | variants[variant]
    if "index_topk" in options:
        # Its class does not work this one out from the other.
        options["num_key_value_heads"] = options["num_attention_heads"]
    for key in ("layer_types", "no_rope_layers"):
        if key in options:
            options[key] = [options[key][layer % 2] for layer in range(options["num_hidden_layers"])]
    config = getattr(transformers, name)(**options)
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = (entry for entry in model.named_buffers() if entry[0].endswith("e_score_correction_bias"))
        for path, parameter in (*model.named_parameters(), *biases):
            centre = 1.0 if path.endswith(_NORMS) else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def reference_logits(folder: Path, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' logits [batch, tokens, vocab_size] in float64 arithmetic and in float32."""
    from tests.support.tiny_models import transformers_logits

    return transformers_logits(folder, token_ids, "float64"), transformers_logits(folder, token_ids)
