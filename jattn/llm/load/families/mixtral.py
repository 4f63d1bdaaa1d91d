"""Mixtral (arXiv:2401.04088) and gpt-oss (arXiv:2508.10925): experts in every layer."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, Raw, every
from jattn.llm.load.families.gguf import Gguf

KEYS = {"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.num_experts_per_tok"}


# Mistral with eight experts, two of them for each token.
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys=KEYS,
    defaults={"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    derive=lambda raw: {"moe.intermediate_size": raw["intermediate_size"]},
    windows="all",
    names={
        "moe.router": "block_sparse_moe.gate",
        "moe.gate_up_proj": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.down_proj": "block_sparse_moe.experts.{expert}.w2",
    },
    # transformers' modules.
    also_spelled={".block_sparse_moe.": ".mlp."},
    gguf=Gguf(architecture="llama", rotates_neighbours=True),
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
    keys=KEYS | {"attention_bias": BOTH_BIASES},
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
