"""GLM-5: GLM-4.7-Flash's layers with an indexer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V32, checked_layers
from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.load.families.glm_moe import NEXT
from torch_core.base.errors import Unsupported


def _own_indexers(raw: Raw) -> dict[str, Any]:
    """Refuses layers that use the choice of an earlier layer's indexer."""
    kinds, frequency = raw.get("indexer_types"), raw.get("index_topk_freq")
    if raw.get("index_topk_pattern") is not None or frequency not in (None, 0, 1):
        name = "index_topk_freq" if frequency not in (None, 0, 1) else "index_topk_pattern"
        raise Unsupported(name, value=raw[name], wanted="this build has an indexer in every layer")
    if kinds not in (None, ["full"] * raw["num_hidden_layers"]):
        raise Unsupported("indexer_types", value=kinds, wanted="this build has 'full' in every layer")
    return checked_layers(raw)


GLM_MOE_DSA = dataclasses.replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V32.defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    options={**DEEPSEEK_V32.options, "latent.index_rope_interleave": True},
    derive=_own_indexers,
    write=mlp_layer_types,
    derived={"indexer_types": None, "index_topk_freq": None, "index_topk_pattern": None},
    ignored=("index_skip_topk_offset", "num_experts"),
    brings_code=False,
    unread=NEXT,
)
