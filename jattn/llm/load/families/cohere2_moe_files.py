"""How files of Cohere 2 with experts spell their layers."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.deepseek_v2 import without_experts
from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.load.families.window_rope import slides
from jattn.llm.models.config import ModelConfig
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported

#: Keys of the file that only functions read.
DERIVED = {
    "first_k_dense_replace": None,
    "prefix_dense_sliding_window_pattern": 1,
    "rms_norm_eps": None,
    "shared_expert_combination_strategy": "sum",
}


def _dense_layers(raw: Raw) -> tuple[int, ...]:
    kinds = raw.get("mlp_layer_types")
    if isinstance(kinds, list):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return without_experts(raw, 0, raw["num_hidden_layers"])


def has_window(layer: int, raw: Raw) -> bool:
    """Returns whether a layer has a window; the pattern begins again after the layers without experts."""
    dense = len(_dense_layers(raw))
    if layer >= dense:
        return slides(layer - dense, raw)
    return bool((layer + 1) % raw["prefix_dense_sliding_window_pattern"])


def layers(raw: Raw) -> dict[str, Any]:
    """Returns the layers without experts and without rotation, the norm, and how scores are made."""
    check_int("prefix_dense_sliding_window_pattern", raw["prefix_dense_sliding_window_pattern"], 1, 512)
    how, fn = raw["shared_expert_combination_strategy"], raw["expert_selection_fn"]
    if raw["num_shared_experts"] and how != "sum":
        wanted = "this build has 'sum' where there are shared experts"
        raise Unsupported("shared_expert_combination_strategy", value=how, wanted=wanted)
    types, dense = raw.get("layer_types"), _dense_layers(raw)
    if not isinstance(types, list | None):
        raise InvalidInput("layer_types", value=types, wanted="it must be a list, or null")
    kinds = (
        [has_window(layer, raw) for layer in range(raw["num_hidden_layers"])]
        if types is None
        else [kind == "sliding_attention" for kind in types]
    )
    turned = dense if raw["prefix_dense_sliding_window_pattern"] == 1 else ()
    found: dict[str, Any] = {"moe.dense_layers": dense}
    if raw.get("sliding_window") is not None:
        found["nope_layers"] = tuple(
            layer for layer, has_window in enumerate(kinds) if not has_window and layer not in turned
        )
    if raw.get("rms_norm_eps") is not None:
        found |= {"norm_type": "rms_norm", "rms_norm_eps": raw["rms_norm_eps"]}
    # Scores that a softmax makes of the chosen logits alone are the normalised ones of all.
    return found | ({"moe.norm_topk_prob": True} if fn == "softmax" else {})


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the file that those fields came from."""
    own = {"rms_norm_eps": config.rms_norm_eps} if config.norm_type == "rms_norm" else {}
    turns = any(layer not in config.nope_layers and config.window_of(layer) is None for layer in _first(config))
    return {**mlp_layer_types(config), **own, "prefix_dense_sliding_window_pattern": 1 if turns else 2}


def _first(config: ModelConfig) -> tuple[int, ...]:
    return () if config.moe is None else config.moe.dense_layers
