"""Ministral 3, and Mistral Small 4 over latents with experts: queries that grow with their position."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn.llm.load.families.deepseek_v2 import NAMES
from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V3
from jattn.llm.load.families.family import Family, Raw, Whole
from torch_core.base.errors import Unsupported

_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6, "rope_scaling": _YARN, "sliding_window": None},
    windows="all",
    rope_keys={"llama_4_scaling_beta": "llama_4_scaling_beta"},
    whole=Whole(architecture="Mistral3ForConditionalGeneration", model_type="mistral3"),
)


def _one_group(raw: Raw) -> dict[str, Any]:
    """Refuses groups, whose ranks here are by their best expert and there by their best two."""
    for name in ("n_group", "topk_group"):
        if raw[name] not in (None, 1):
            raise Unsupported(name, value=raw[name], wanted="this build has 1 there")
    return {}


# V3's layers with softmax scores.
MISTRAL4 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    also_types=(),
    defaults={
        **DEEPSEEK_V3.all_defaults,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "rope_scaling": {**_YARN, "factor": 128.0, "original_max_position_embeddings": 8192},
    },
    options={},
    derive=lambda raw: _one_group(raw) | {"head_dim": raw["qk_rope_head_dim"]},
    absent=("head_dim",),
    # Of the whole head, and the share of it that rotates.
    ignored=("head_dim", "partial_rotary_factor"),
    inert={"moe_layer_freq": 1, "rope_interleave": True},
    rope_keys={"llama_4_scaling_beta": "llama_4_scaling_beta"},
    names={**NAMES, "moe.gate_up_proj": "mlp.experts.gate_up_proj", "moe.down_proj": "mlp.experts.down_proj"},
    experts_out_in=True,
    brings_code=False,
    whole=Whole(architecture="Mistral3ForConditionalGeneration", model_type="mistral3"),
)
