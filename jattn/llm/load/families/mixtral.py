"""Mixtral (arXiv:2401.04088): Mistral with eight experts, two of them for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.family import Family


def _experts_width(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe.intermediate_size": raw["intermediate_size"]}


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys={"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.num_experts_per_tok"},
    defaults={"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    derive=_experts_width,
    windows="all",
    names={
        "moe.router": "block_sparse_moe.gate",
        "moe.gate_up_proj": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.down_proj": "block_sparse_moe.experts.{expert}.w2",
    },
)
