"""Granite with sinks and windows, dense and with experts; some layers do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jattn.llm.load.families.family import Family, Raw
from jattn.llm.load.families.granite_hybrid import SHARED_NAMES
from jattn.llm.load.families.granite_moe import GRANITE_MOE_SHARED
from jattn.llm.load.families.llama import GRANITE
from jattn.llm.models.config import ModelConfig
from torch_core.base.errors import Unsupported


def _thetas(raw: Raw) -> list[Any]:
    """Returns the base of each layer, 0 without rotation; refuses layers that rotate by several ones."""
    count, own = raw["num_hidden_layers"], raw.get("rope_theta", (raw.get("rope_parameters") or {}).get("rope_theta"))
    thetas = raw.get("layer_rope_theta")
    thetas = [own] * count if thetas is None else thetas
    if not isinstance(thetas, list) or len(thetas) != count or any(each not in (0, own) for each in thetas):
        wanted = f"this build has 0 or rope_theta ({own}) for each of the {count} layers"
        raise Unsupported("layer_rope_theta", value=thetas, wanted=wanted)
    return thetas


def _written(config: ModelConfig) -> Raw:
    layers = range(config.num_hidden_layers)
    return {"layer_rope_theta": [0 if layer in config.nope_layers else config.rope_theta for layer in layers]}


def _with_sinks(family: Family, architecture: str, model_type: str, **defaults: Any) -> Family:
    """Returns the family with sinks, windows in three of four layers, and rotation in some."""
    return replace(
        family,
        architecture=architecture,
        model_type=model_type,
        defaults={**family.all_defaults, "sliding_window": 128, "rope_theta": 10000.0, **defaults},
        options={**family.options, "attention_sinks": True},
        derive=lambda raw: {"nope_layers": tuple(layer for layer, theta in enumerate(_thetas(raw)) if theta == 0)},
        write=_written,
        derived={"layer_rope_theta": None},
        windows=lambda layer, raw: bool(layer % 4),
        gguf=None,
    )


GRANITE_SWA = _with_sinks(GRANITE, "GraniteSWAForCausalLM", "granite_swa", rms_norm_eps=1e-5, tie_word_embeddings=True)
_EXPERTS = "block_sparse_moe.experts"
GRANITE_MOE_SWA = replace(
    _with_sinks(GRANITE_MOE_SHARED, "GraniteMoeSWAForCausalLM", "granitemoe_swa"),
    names={
        "moe.router": "block_sparse_moe.router",
        **{f"moe.{name}": f"{_EXPERTS}.{name}" for name in ("gate_up_proj", "down_proj")},
        **SHARED_NAMES,
    },
)
