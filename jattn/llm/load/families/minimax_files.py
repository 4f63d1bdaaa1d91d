"""How files of MiniMax spell the factors and the types of layers: transformers' way and the first one."""

from __future__ import annotations

from typing import Any

import numpy as np

from jattn.llm.load.families.family import Raw, check_rotary_dim
from jattn.llm.models.config import ModelConfig
from torch_core.base.errors import InvalidInput, Unsupported

KINDS = ("full_attn", "linear_attn", "mlp")
#: Their names in the first files.
OLD_KINDS = tuple(zip(KINDS, ("full_attention", "linear_attention", "mlp"), strict=True))
FACTORS = {"alpha": "stream_multiplier", "beta": "residual_multiplier"}
#: Keys of the first files that only functions read.
DERIVED: dict[str, Any] = {"attn_type_list": None, "rotary_dim": None, "shared_intermediate_size": 0}


def sizes(raw: Raw) -> dict[str, Any]:
    """Returns the sizes of lightning attention and of experts; refuses factors that differ, and a shared expert."""
    check_rotary_dim(raw)
    for factor in FACTORS:
        values = [raw[f"{kind}_{factor}_factor"] for kind in KINDS]
        if any(value != values[0] for value in values):
            name = f"mlp_{factor}_factor"
            raise Unsupported(name, value=raw[name], wanted=f"this build has one for all branches; others are {values}")
    if raw.get("shared_intermediate_size") not in (None, 0, [0]):
        wanted = "this build has no shared expert there: 0"
        raise Unsupported("shared_intermediate_size", value=raw["shared_intermediate_size"], wanted=wanted)
    heads = raw["num_attention_heads"]
    given = raw.get("head_dim")
    return {
        "moe.intermediate_size": raw["intermediate_size"],
        "lightning.num_heads": heads,
        "lightning.head_dim": raw["hidden_size"] // heads if given is None else given,
    }


def layer_types(raw: Raw) -> list[str]:
    """Returns the types of a file without layer_types: those of attn_type_list, or every second one."""
    count, given = raw["num_hidden_layers"], raw.get("attn_type_list")
    if given is None:
        return ["linear_attention" if layer % 2 else "full_attention" for layer in range(count)]
    if not isinstance(given, list) or len(given) != count or any(kind not in (0, 1) for kind in given):
        wanted = f"it must have 0 or 1 for each of the {count} layers"
        raise InvalidInput("attn_type_list", value=given, wanted=wanted)
    return ["full_attention" if kind else "linear_attention" for kind in given]


def slope_rates(config: ModelConfig, layer: int) -> np.ndarray:
    """Returns the rates of decay of a layer's heads, which the first files do not have: slower in later layers."""
    heads = config.num_attention_heads
    factor = 1 - layer / (config.num_hidden_layers - 1 + 1e-5) + 1e-5
    return (2.0 ** (-8 * np.arange(1, heads + 1) / heads) * factor).astype(np.float32)
