"""gpt-oss (arXiv:2508.10925): experts with biases, attention sinks, windows on every second layer, MXFP4 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.family import BOTH_BIASES, Family, every

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe.intermediate_size": raw["intermediate_size"], "moe.router_bias": True, "moe.expert_bias": True}


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    keys={
        "attention_bias": BOTH_BIASES,
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_tok",
    },
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
