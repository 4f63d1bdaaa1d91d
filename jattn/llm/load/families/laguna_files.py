"""How files of Laguna spell the heads of their layers, and the gate of attention."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.models.config import ModelConfig
from torch_core.base.errors import InvalidInput, Unsupported

#: Keys of the file that only functions read.
DERIVED: dict[str, Any] = {"gating": "per-head", "gating_types": None, "num_attention_heads_per_layer": None}
_OF_HEADS = (True, "per-head", "per_head")
_OF_ELEMENTS = ("per-element", "per_element")


def sizes(raw: Raw) -> dict[str, Any]:
    """Returns the heads of both kinds of layers, the kind of the gate, and the layers without experts."""
    count, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    types = raw.get("layer_types") or ["full_attention"] * count
    given = raw["num_attention_heads_per_layer"]
    listed = [heads] * count if given is None else given
    if not isinstance(types, list) or not isinstance(listed, list) or not len(types) == len(listed) == count:
        wanted = f"it must have one number for each of the {count} layers, as layer_types"
        raise InvalidInput("num_attention_heads_per_layer", value=given, wanted=wanted)
    of_kind = {kind: {own for own, each in zip(listed, types, strict=True) if each == kind} for kind in types}
    if any(len(own) > 1 for own in of_kind.values()):
        wanted = "this build has one number for layers with a window, and one for the others"
        raise Unsupported("num_attention_heads_per_layer", value=given, wanted=wanted)
    full = next(iter(of_kind.get("full_attention", {heads})))
    return {
        "num_attention_heads": next(iter(of_kind.get("sliding_attention", {full}))),
        "full_attention.num_attention_heads": full,
        "full_attention.head_dim": raw["head_dim"],
        "full_attention.num_key_value_heads": raw["num_key_value_heads"],
        "moe.dense_layers": (0,),
        **_gate(raw),
    }


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the file that those fields came from."""
    layers = [config.of_layer(layer) for layer in range(config.num_hidden_layers)]
    return {
        **mlp_layer_types(config),
        "num_attention_heads_per_layer": [own.num_attention_heads for own in layers],
        "gating": "per-head" if config.attn_head_gate else "per-element",
    }


def gate_name(config: ModelConfig) -> dict[str, Any]:
    """Returns the names of the projection that gives a gate for each element."""
    pieces = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g"))
    return {"self_attn.qkv_proj": pieces} if config.attn_output_gate else {}


def _gate(raw: Raw) -> dict[str, Any]:
    kinds = raw["gating_types"]
    for name, value in (("gating", raw["gating"]), *(("gating_types", kind) for kind in kinds or ())):
        if value not in (*_OF_HEADS, *_OF_ELEMENTS):
            raise Unsupported(name, value=value, wanted="this build has 'per-head' and 'per-element'")
    of_elements = raw["gating"] in _OF_ELEMENTS
    if any((kind in _OF_ELEMENTS) != of_elements for kind in kinds or ()):
        raise Unsupported("gating_types", value=kinds, wanted=f"all layers have gating ({raw['gating']!r})")
    if of_elements and raw["attention_bias"]:
        raise Unsupported("attention_bias", value=True, wanted="this build has false with a gate for each element")
    return {"attn_output_gate": of_elements, "attn_head_gate": not of_elements}
