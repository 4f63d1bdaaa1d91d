"""Mixtral (arXiv:2401.04088), OLMoE, MiniMax-M2 and gpt-oss (arXiv:2508.10925): experts in every layer."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw, every, expert_names
from jattn.llm.load.families.gguf import Gguf

_KEYS = {"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.num_experts_per_tok"}


# Mistral with eight experts, two of them for each token.
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys=_KEYS,
    defaults={"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"]},
    windows="all",
    names={
        "moe.router": "block_sparse_moe.gate",
        "moe.gate_up_proj": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.down_proj": "block_sparse_moe.experts.{expert}.w2",
    },
    gguf=Gguf(architecture="llama", rotates_neighbours=True),
)

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

# MiniMax-M2: sigmoid scores with a correction, rotation of a part of each head, norms on all heads at once.
MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    keys=_KEYS,
    defaults={
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "partial_rotary_factor": lambda raw: raw["rotary_dim"] / raw["head_dim"] if raw.get("rotary_dim") else 1.0,
    },
    options={"qk_norm": "all", "moe.scoring_func": "sigmoid", "moe.score_correction_bias": True},
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"]},
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
    names={
        "moe.router": "block_sparse_moe.gate",
        "moe.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "moe.gate_up_proj": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.down_proj": "block_sparse_moe.experts.{expert}.w2",
    },
    brings_code=True,
)

# Experts with biases, attention sinks, windows on every second layer, MXFP4 weights.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts(raw: Raw) -> dict[str, Any]:
    return {"moe.intermediate_size": raw["intermediate_size"], "moe.router_bias": True, "moe.expert_bias": True}


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    keys=_KEYS | {"attention_bias": BOTH_BIASES},
    defaults={
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": _YARN,
    },
    options={"norm_type": "rms_norm_wide", "attention_sinks": True, "hidden_act": "swigluoai"},
    derive=_experts,
    inert={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    aliases={"experts_per_token": "num_experts_per_tok"},
    windows=every(2),
    names={
        "moe.router": "mlp.router",
        "moe.gate_up_proj": "mlp.experts.gate_up_proj",
        "moe.down_proj": "mlp.experts.down_proj",
    },
    order={"moe.gate_up_proj": "alternating"},
)
