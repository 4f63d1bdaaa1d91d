"""GLM-5: GLM-4.7-Flash's layers with an indexer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jattn.llm.load.families.deepseek_v3 import DEEPSEEK_V32, checked_layers
from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.load.families.glm_moe import NEXT
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import MAX_CONTEXT
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput

_LETTERS = {"F": "full", "S": "shared"}
#: Keys of a file without a list or a pattern, and their defaults: every so many layers one has an indexer, from a layer
#: on.
_SCHEDULE = {"index_topk_freq": 1, "index_skip_topk_offset": 2}


def _indexers(raw: Raw) -> dict[str, Any]:
    """Returns the layers that use the choice of an earlier layer's indexer."""
    count, name = raw["num_hidden_layers"], "indexer_types"
    if (kinds := raw.get(name)) is None:
        name, kinds = "index_topk_pattern", raw.get("index_topk_pattern")
        kinds = [_LETTERS.get(each, each) for each in kinds] if isinstance(kinds, str) else kinds
    if kinds is None:
        given = {each: default if raw.get(each) is None else raw[each] for each, default in _SCHEDULE.items()}
        for each, value in given.items():
            check_int(each, value, 0, MAX_CONTEXT)
        frequency, offset = given.values()
        name = "index_skip_topk_offset"
        kinds = ["shared" if max(layer - offset + 1, 0) % max(frequency, 1) else "full" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= {"full", "shared"}:
        wanted = f"it must have 'full' or 'shared' for each of the {count} layers"
        raise InvalidInput(name, value=raw.get(name), wanted=wanted)
    if kinds[0] != "full":
        raise InvalidInput(name, value=raw.get(name), wanted="the first layer has an indexer: 'full'")
    shared = tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")
    return {**checked_layers(raw), "latent.index_shared_layers": shared}


def _types(config: ModelConfig) -> Raw:
    layers = range(config.num_hidden_layers)
    kinds = ["full" if layer in config.index_layers else "shared" for layer in layers]
    return {**mlp_layer_types(config), "indexer_types": kinds}


GLM_MOE_DSA = dataclasses.replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V32.all_defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    options={**DEEPSEEK_V32.options, "latent.index_rope_interleave": True},
    derive=_indexers,
    write=_types,
    derived={"indexer_types": None, "index_topk_pattern": None, **_SCHEDULE},
    aliases={"num_experts": "n_routed_experts"},
    inert={**DEEPSEEK_V32.inert, "indexer_rope_interleave": True, "moe_router_dtype": "float32"},
    ignored=("index_share_for_mtp_iteration",),
    brings_code=False,
    unread=NEXT,
)
