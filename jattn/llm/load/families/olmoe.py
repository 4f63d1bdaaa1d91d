"""OLMoE, FlexOlmo and MiniMax-M2: experts in every layer, norms on all heads at once."""

from __future__ import annotations

from dataclasses import replace

from jattn.llm.load.families.family import BOTH_BIASES, Family, check_rotary_dim, expert_names
from jattn.llm.load.families.mixtral import KEYS, MIXTRAL
from jattn.llm.load.families.norms import OLMO2

# OLMoE (arXiv:2409.02060): norms on all heads of queries and of keys at once, no windows.
OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys={
        "attention_bias": BOTH_BIASES,
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
        "norm_topk_prob": "moe.norm_topk_prob",
        "clip_qkv": "clip_qkv",
    },
    defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    options={"qk_norm": "all"},
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"]},
    absent=("head_dim",),
    aliases={"num_local_experts": "num_experts"},
    names={"moe.router": "mlp.gate"} | expert_names("moe", "mlp.experts.{expert}"),
)

# FlexOlmo (arXiv:2507.07024): OLMo 2's layers, each expert from data of its own.
FLEX_OLMO = replace(
    OLMOE,
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    keys={name: key for name, key in OLMOE.keys.items() if name != "clip_qkv"},
    defaults={"num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False, "rope_theta": 5e5},
    options=OLMO2.options,
    names={**OLMOE.names, **OLMO2.names},
)

# MiniMax-M2: sigmoid scores with a correction, rotation of a part of each head, norms on all heads at once.
MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    keys=KEYS,
    defaults={
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "partial_rotary_factor": lambda raw: raw["rotary_dim"] / raw["head_dim"] if raw.get("rotary_dim") else 1.0,
    },
    options={"qk_norm": "all", "moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    derive=lambda raw: check_rotary_dim(raw) or {"moe.intermediate_size": raw["intermediate_size"]},
    derived={"rotary_dim": None},
    aliases={"num_experts": "num_local_experts"},
    # Of other layers and of a second token, and scales of residuals that are not used.
    ignored=(
        *("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
        *("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode"),
    ),
    inert={
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
    rope_keys={"partial_rotary_factor": "partial_rotary_factor"},
    names={**MIXTRAL.names, "moe.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias"},
    # transformers' module.
    also_spelled={".block_sparse_moe.": ".mlp."},
    brings_code=True,
)
