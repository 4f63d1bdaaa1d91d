"""The same of families that came after the first ones of each kind."""

from __future__ import annotations

from typing import Any

from tests.support.family_cases import ALTERNATING, EXPERTS, GEMMA4, GLM_EXPERTS, MINI_LATENT, SMALL_WINDOW, YARN

_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_MIMO = SMALL_WINDOW | {"head_dim": 12, "v_head_dim": 6, "mlp_layer_types": ["sparse", "dense"]}
_MIMO |= {name: value for name, value in GLM_EXPERTS.items() if name != "first_k_dense_replace"}
# Four devices share them.
_MIMO |= {"n_routed_experts": 8}
_LAGUNA = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 20, "mlp_layer_types": ["sparse", "dense"]}
_LING = {name: value for name, value in MINI_LATENT.items() if name != "q_lora_rank"}
_LING |= {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2}
_LING |= {"head_dim": 8, "first_k_dense_replace": 1}
_AXK1 = MINI_LATENT | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NEWER_CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "Gemma4UnifiedForCausalLM": (
        "Gemma4UnifiedTextConfig",
        [
            GEMMA4,
            GEMMA4
            | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 3.0}
            | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        ],
    ),
    "LagunaForCausalLM": (
        "LagunaConfig",
        [
            _LAGUNA | {"head_dim": 8, "gating": "per-element"},
            _LAGUNA
            | SMALL_WINDOW
            | {"head_dim": 16, "attention_bias": True, "layer_types": ALTERNATING}
            | {"num_attention_heads_per_layer": [4, 8], "moe_routed_scaling_factor": 2.5}
            | {
                "rope_parameters": {
                    "full_attention": YARN | {"partial_rotary_factor": 0.5},
                    "sliding_attention": _LOCAL,
                }
            },
        ],
    ),
    "MiMoV2FlashForCausalLM": (
        "MiMoV2FlashConfig",
        [
            _MIMO | {"attention_value_scale": None, "layer_types": ["full_attention"] * 2, "attention_bias": True},
            _MIMO | {"layer_types": ["sliding_attention", "full_attention"], "routed_scaling_factor": 2.5},
        ],
    ),
    "Lfm3ForCausalLM": (
        "Lfm3Config",
        [
            SMALL_WINDOW
            | {"head_dim": 8, "use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True}
            | {"layer_types": ["full_attention", "conv"], "conv_L_cache": 3},
            # Of five layers one is of each kind.
            SMALL_WINDOW | {"head_dim": 16, "num_hidden_layers": 5, "tie_word_embeddings": False, "conv_bias": True},
        ],
    ),
    "BailingHybridForCausalLM": (
        "BailingHybridConfig",
        [
            _LING | {"layer_types": ["full_attention", "linear_attention"], "kda_safe_gate": False},
            _LING | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse", "dense"]},
        ],
    ),
    "MinistralForCausalLM": (
        "MinistralConfig",
        [SMALL_WINDOW | {"head_dim": 8}, SMALL_WINDOW | {"layer_types": ALTERNATING, "head_dim": 16}],
    ),
    "HYV3ForCausalLM": (
        "HYV3Config",
        [
            EXPERTS | {"head_dim": 8},
            EXPERTS | {"head_dim": 16, "attention_bias": True, "mlp_layer_types": ["sparse", "dense"]},
        ],
    ),
    "Dots1ForCausalLM": (
        "Dots1Config",
        [
            GLM_EXPERTS | {"n_shared_experts": 1, "norm_topk_prob": True},
            GLM_EXPERTS
            | SMALL_WINDOW
            | {"max_window_layers": 1, "attention_bias": True, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        ],
    ),
    "ExaoneMoeForCausalLM": (
        "ExaoneMoeConfig",
        [
            EXPERTS | SMALL_WINDOW | {"num_shared_experts": 2},
            EXPERTS
            | SMALL_WINDOW
            | {"sliding_window_pattern": 2, "first_k_dense_replace": 0, "n_group": 3}
            | {"topk_group": 2},
        ],
    ),
    "YoutuForCausalLM": (
        "YoutuConfig",
        [MINI_LATENT, MINI_LATENT | {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": False}],
    ),
    "Cohere2MoeForCausalLM": (
        "Cohere2MoeConfig",
        [
            SMALL_WINDOW | {"num_experts": 6, "head_dim": 8, "sliding_window_pattern": 2},
            SMALL_WINDOW
            | {"num_experts": 6, "head_dim": 16, "layer_types": ALTERNATING, "expert_selection_fn": "sigmoid"}
            | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5}
            | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_intermediate_size": 40, "norm_topk_prob": False},
        ],
    ),
    "MellumForCausalLM": (
        "MellumConfig",
        [
            EXPERTS | {"head_dim": 8},
            EXPERTS
            | SMALL_WINDOW
            | {"head_dim": 16, "layer_types": ALTERNATING, "mlp_layer_types": ["sparse", "dense"]}
            | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}},
        ],
    ),
    "FlintForCausalLM": (
        "FlintConfig",
        [
            EXPERTS | SMALL_WINDOW | {"head_dim": 8, "shared_expert_intermediate_size": 20, "num_hidden_layers": 4},
            EXPERTS
            | SMALL_WINDOW
            | {"head_dim": 16, "shared_expert_intermediate_size": 20, "layer_types": ALTERNATING}
            | {"mlp_only_layers": [], "norm_topk_prob": False},
        ],
    ),
    "FlexOlmoForCausalLM": (
        "FlexOlmoConfig",
        [{"num_experts": 6, "num_experts_per_tok": 2}, {"num_experts": 6, "norm_topk_prob": True}],
    ),
    "HyperCLOVAXForCausalLM": (
        "HyperCLOVAXConfig",
        [
            {"use_post_norm": False},
            {"head_dim": 8, "embedding_multiplier": 12.0, "logits_scaling": 0.5, "residual_multiplier": 0.22}
            | {"attention_multiplier": 0.1, "mlp_bias": True, "attention_bias": True},
        ],
    ),
    "Jais2ForCausalLM": ("Jais2Config", [{"head_dim": 16}, {"mlp_bias": False, "attention_bias": False}]),
    "VaultGemmaForCausalLM": (
        "VaultGemmaConfig",
        [SMALL_WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 12, "final_logit_softcapping": 3.0}],
    ),
    "AXK1ForCausalLM": (
        "AXK1Config",
        [
            _AXK1 | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
            _AXK1 | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"], "rope_interleave": True},
        ],
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        [
            {"ffn_dim": 48, "do_layer_norm_before": False, "enable_bias": False},
            {"ffn_dim": 48, "tie_word_embeddings": False, "activation_function": "gelu"},
            {"ffn_dim": 48, "layer_norm_elementwise_affine": False, "enable_bias": False},
        ],
    ),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        [
            {"attention_types": [[["global"], 1]] * 2},
            {"attention_types": [[["global"], 1], [["local"], 1]], "window_size": 7, "activation_function": "relu"},
        ],
    ),
    "GPTJForCausalLM": (
        "GPTJConfig",
        [{"rotary_dim": 8}, {"rotary_dim": 4, "n_inner": 40, "activation_function": "relu"}],
    ),
    "GPTBigCodeForCausalLM": (
        "GPTBigCodeConfig",
        [{"multi_query": False}, {"n_inner": 40, "tie_word_embeddings": False}],
    ),
    "NanoChatForCausalLM": (
        "NanoChatConfig",
        [{"final_logit_softcapping": None}, {"attention_bias": True, "tie_word_embeddings": True}],
    ),
    "OlmoForCausalLM": ("OlmoConfig", [{}, {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}]),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", [{"num_local_experts": 6, "attention_multiplier": 0.3}]),
    "GraniteMoeSharedForCausalLM": (
        "GraniteMoeSharedConfig",
        [
            {"num_local_experts": 6},
            {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 20, "logits_scaling": 6.0}
            | {"attention_bias": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        ],
    ),
    "GraniteSWAForCausalLM": (
        "GraniteSWAConfig",
        [SMALL_WINDOW, SMALL_WINDOW | {"layer_types": ALTERNATING, "layer_rope_theta": [10000.0, 0]}],
    ),
    "GraniteMoeSWAForCausalLM": (
        "GraniteMoeSWAConfig",
        [
            SMALL_WINDOW
            | {"num_local_experts": 6, "layer_rope_theta": [0, 10000.0], "shared_intermediate_size": 20}
            | {"attention_multiplier": 0.3},
        ],
    ),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig",
        [
            EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
            EXPERTS
            | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0, "conv_bias": True}
            | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        ],
    ),
}
