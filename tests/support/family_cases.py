"""The options of one tiny checkpoint for each family and each of its options."""

from __future__ import annotations

from typing import Any

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
SMALL_WINDOW = {"sliding_window": 7}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
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
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_n_groups": 2, "mamba_d_state": 6}
_SSM_FACTORS = {"ssm_in_multiplier": 1.25, "key_multiplier": 0.4, "ssm_multipliers": [0.5, 0.8, 1.2, 1.5, 0.7]}
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
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
_KIMI = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
_LATENT = {name: value for name, value in _DEEPSEEK.items() if name not in ("n_group", "topk_group")}
_LATENT |= {"num_key_value_heads": 4}
_TEMPERATURE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
GLM_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SOLAR = {name: value for name, value in GLM_EXPERTS.items() if name != "first_k_dense_replace"} | {"head_dim": 8}
_TRINITY = SMALL_WINDOW | EXPERTS | {"head_dim": 8, "global_attn_every_n_layers": 2}
_LIGHTNING = {"num_local_experts": 6, "block_size": 16}
_ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention"]
MINI_LATENT = {name: _DEEPSEEK[name] for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim")}
MINI_LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
_SHORT = {"short_factor": [1.0, 1.2], "long_factor": [1.5, 3.0], "original_max_position_embeddings": 16}
_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
_CHUNKS = {"num_local_experts": 6, "head_dim": 8, "intermediate_size_mlp": 40, "attention_chunk_size": 8}
GEMMA4 = SMALL_WINDOW | {"head_dim": 8, "global_head_dim": 16, "layer_types": ALTERNATING}
#: By family, the class of transformers and what its options are in each variant: off first, then on.
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        [
            {},
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
            {"rope_parameters": YARN},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        ],
    ),
    "MistralForCausalLM": ("MistralConfig", [SMALL_WINDOW, {"sliding_window": None}]),
    "Qwen2ForCausalLM": ("Qwen2Config", [{}, _QWEN_WINDOW]),
    "Qwen3ForCausalLM": ("Qwen3Config", [{"head_dim": 16}, _QWEN_WINDOW | {"head_dim": 8, "attention_bias": True}]),
    "GemmaForCausalLM": ("GemmaConfig", [{"head_dim": 16}, {"head_dim": 8, "attention_bias": True}]),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        [
            SMALL_WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 12, "final_logit_softcapping": 3.0},
            {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        ],
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        [
            SMALL_WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
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
    "Gemma4ForCausalLM": (
        "Gemma4TextConfig",
        [
            GEMMA4 | {"hidden_size_per_layer_input": 0},
            GEMMA4
            | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 6}
            | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
            | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
            | {"final_logit_softcapping": 3.0, "vocab_size_per_layer_input": 203},
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
            SMALL_WINDOW | {"attention_bias": True},
            SMALL_WINDOW
            | {
                "rope_parameters": {
                    "full_attention": YARN,
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
    "MixtralForCausalLM": ("MixtralConfig", [{"num_local_experts": 6}, SMALL_WINDOW | {"num_experts_per_tok": 3}]),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        [
            EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
            EXPERTS | {"head_dim": 8, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7},
        ],
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        [
            EXPERTS | {"shared_expert_intermediate_size": 40},
            EXPERTS | _QWEN_WINDOW | {"shared_expert_intermediate_size": 8, "qkv_bias": False, "norm_topk_prob": True},
        ],
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        [
            SMALL_WINDOW | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
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
                "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
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
                "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
            },
        ],
    ),
    "DeepseekV32ForCausalLM": (
        "DeepseekV32Config",
        [
            _DEEPSEEK | _INDEXER | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale_all_dim": 1.0}},
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
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        [
            _DELTA | EXPERTS | {"shared_expert_intermediate_size": 20, "head_dim": 16, "mlp_only_layers": [0]},
            _DELTA | EXPERTS | {"shared_expert_intermediate_size": 20, "head_dim": 8, "attention_bias": True},
        ],
    ),
    "Qwen3_5ForCausalLM": (
        "Qwen3_5TextConfig",
        [_DELTA | {"head_dim": 16}, _DELTA | {"head_dim": 8, "tie_word_embeddings": True}],
    ),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3_5MoeTextConfig",
        [_DELTA | EXPERTS | {"shared_expert_intermediate_size": 20, "head_dim": 8}],
    ),
    "OlmoHybridForCausalLM": (
        "OlmoHybridConfig",
        [
            _DELTA | {"linear_num_key_heads": 4, "linear_key_head_dim": 6, "linear_allow_neg_eigval": False},
            _DELTA | {"linear_num_key_heads": 2, "linear_key_head_dim": 12, "rope_parameters": {"rope_theta": None}},
        ],
    ),
    "KimiLinearForCausalLM": (
        "KimiLinearConfig",
        [
            _KIMI | {"layer_types": ["full_attention", "linear_attention"], "num_shared_experts": 2},
            _KIMI | {"layer_types": ["linear_attention", "full_attention"], "moe_renormalize": False},
        ],
    ),
    "Glm4MoeForCausalLM": (
        "Glm4MoeConfig",
        [GLM_EXPERTS, GLM_EXPERTS | {"attention_bias": True, "use_qk_norm": True, "n_group": 3, "topk_group": 2}],
    ),
    "MiniMaxM2ForCausalLM": (
        "MiniMaxM2Config",
        [{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4}],
    ),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", [{"head_dim": 16}, {"head_dim": 8, "use_bias": True}]),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig",
        [
            _ERNIE_EXPERTS,
            _ERNIE_EXPERTS | {"moe_layer_start_index": 0, "use_bias": True, "tie_word_embeddings": False},
        ],
    ),
    "HunYuanDenseV1ForCausalLM": (
        "HunYuanDenseV1Config",
        [
            {"head_dim": 8},
            {"head_dim": 16, "attention_bias": True, "rope_parameters": dict(_ALPHA)},
        ],
    ),
    "HunYuanMoEV1ForCausalLM": ("HunYuanMoEV1Config", [{"head_dim": 8, "num_experts": 6, "moe_topk": 2}]),
    "Ministral3ForCausalLM": (
        "Ministral3Config",
        [{"head_dim": 8, "rope_parameters": dict(_TEMPERATURE)} | each for each in ({}, SMALL_WINDOW)],
    ),
    "Exaone4ForCausalLM": (
        "Exaone4Config",
        [
            {"sliding_window": None, "layer_types": ["full_attention"] * 2},
            SMALL_WINDOW | {"sliding_window_pattern": 2},
        ],
    ),
    "Cohere2ForCausalLM": (
        "Cohere2Config",
        [SMALL_WINDOW, SMALL_WINDOW | {"layer_types": ALTERNATING, "attention_bias": True, "logit_scale": 0.3}],
    ),
    "OlmoeForCausalLM": (
        "OlmoeConfig",
        [
            {"num_experts": 6, "num_experts_per_tok": 2},
            {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.5, "norm_topk_prob": True},
        ],
    ),
    "PhiForCausalLM": ("PhiConfig", [{}, {"qk_layernorm": True, "hidden_act": "gelu"}]),
    "PhimoeForCausalLM": (
        "PhimoeConfig",
        [
            {"num_local_experts": 6, "router_jitter_noise": 0.2},
            SMALL_WINDOW | {"num_local_experts": 6, "lm_head_bias": True, "attention_bias": True},
        ],
    ),
    "NemotronForCausalLM": ("NemotronConfig", [{}, {"mlp_bias": True, "attention_bias": True, "head_dim": 16}]),
    "ApertusForCausalLM": ("ApertusConfig", [{}, {"attention_bias": True, "rope_parameters": {"rope_theta": 1e4}}]),
    "ArceeForCausalLM": ("ArceeConfig", [{}, {"mlp_bias": True, "attention_bias": True, "head_dim": 16}]),
    "HeliumForCausalLM": ("HeliumConfig", [{"head_dim": 8}]),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        [
            _CHUNKS | {"use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [1]},
            _CHUNKS | {"num_experts_per_tok": 2, "floor_scale": 4, "attn_scale": 0.3, "no_rope_layers": [1, 0]},
        ],
    ),
    "StableLmForCausalLM": (
        "StableLmConfig",
        [{"use_qkv_bias": True}, {"qk_layernorm": True, "use_parallel_residual": True}],
    ),
    "PersimmonForCausalLM": ("PersimmonConfig", [{"qk_layernorm": False}, {}]),
    "InternLM3ForCausalLM": ("InternLM3Config", [{"head_dim": 8}, {"head_dim": 16, "bias": True, "qkv_bias": True}]),
    "MiniCPM3ForCausalLM": (
        "MiniCPM3Config",
        [
            MINI_LATENT | {"q_lora_rank": None, "scale_depth": None},
            MINI_LATENT | {"rope_parameters": _LONGROPE | _SHORT, "attention_bias": True, "mlp_bias": True},
        ],
    ),
    "Mistral4ForCausalLM": (
        "Mistral4Config",
        [
            _LATENT | {"rope_parameters": dict(_TEMPERATURE), "first_k_dense_replace": 1},
            _LATENT | {"rope_parameters": dict(_TEMPERATURE), "norm_topk_prob": False},
        ],
    ),
    "Glm4MoeLiteForCausalLM": (
        "Glm4MoeLiteConfig",
        [_LATENT, _LATENT | {"mlp_layer_types": ["sparse", "dense"], "attention_bias": True}],
    ),
    "GlmMoeDsaForCausalLM": (
        "GlmMoeDsaConfig",
        # Of 5 tokens the last ones may be as good as others.
        [
            _LATENT | _INDEXER | {"first_k_dense_replace": 1, "indexer_types": ["full", "shared"]},
            _LATENT | _INDEXER | {"mlp_layer_types": ["sparse", "dense"], "index_topk": 200, "norm_topk_prob": False},
        ],
    ),
}
CASES |= {
    "CwmForCausalLM": (
        "CwmConfig",
        [
            SMALL_WINDOW | {"head_dim": 8, "layer_types": ALTERNATING, "rope_parameters": _LLAMA3},
            SMALL_WINDOW | {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ],
    ),
    "SolarOpenForCausalLM": (
        "SolarOpenConfig",
        [
            _SOLAR,
            _SOLAR | {"attention_bias": True, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        ],
    ),
    "AfmoeForCausalLM": (
        "AfmoeConfig",
        [
            _TRINITY | {"num_dense_layers": 1, "num_shared_experts": 1},
            _TRINITY | {"num_dense_layers": 0, "mup_enabled": True, "route_scale": 2.5, "layer_types": ALTERNATING},
        ],
    ),
    "MiniMaxForCausalLM": (
        "MiniMaxConfig",
        [
            _LIGHTNING | {"layer_types": ["full_attention", "linear_attention"]},
            _LIGHTNING
            | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 6, "num_experts_per_tok": 3}
            | {f"{kind}_alpha_factor": 3.5 for kind in ("full_attn", "linear_attn", "mlp")}
            | {f"{kind}_beta_factor": 0.5 for kind in ("full_attn", "linear_attn", "mlp")},
        ],
    ),
    "BambaForCausalLM": (
        "BambaConfig",
        [
            _MAMBA | {"attn_layer_indices": [1]},
            _MAMBA
            | {"attn_layer_indices": [0], "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
            | {"mamba_conv_bias": False, "time_step_limit": (0.3, 0.8)},
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
            | _SSM_FACTORS
            | {"mamba_d_ssm": None, "mamba_rms_norm": True, "projectors_bias": True}
            | {"mamba_norm_before_gate": False, "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0}
            | {"mlp_multipliers": [0.7, 1.4], "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.8},
            _MAMBA | _SSM_FACTORS | {"mamba_d_ssm": 64, "head_dim": 12, "ssm_out_multiplier": 0.6},
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
_GPTS = ("GPT2LMHeadModel", "BloomForCausalLM", "FalconForCausalLM", "OPTForCausalLM", "GPTJForCausalLM")
_GPTS += ("GPTBigCodeForCausalLM", "GPTNeoForCausalLM")
ABSENT = {
    "GPTNeoXForCausalLM": ("num_key_value_heads",),
    **dict.fromkeys(_GPTS, ("num_key_value_heads", "intermediate_size")),
    "PersimmonForCausalLM": ("num_key_value_heads",),
    "SolarOpenForCausalLM": ("intermediate_size",),
}
