"""How published files of Kimi Linear spell their layers, in an object of their own."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.deepseek_v2 import without_experts
from jattn.llm.load.families.family import Raw
from torch_core.base.errors import InvalidInput

#: Their names in the object linear_attn_config of published files.
OF_OBJECT = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


#: Parts of names as other writers and transformers' modules have them.
ALSO_SPELLED = {
    ".mlp.": ".block_sparse_moe.",
    ".block_sparse_moe.": ".mlp.",
    "self_attn.f_": "self_attn.forget_gate.f_",
}


def of_object(raw: Raw, name: str) -> Any:
    """Returns a value of linear_attn_config; None if it is not there."""
    given = raw.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise InvalidInput("linear_attn_config", value=given, wanted="it must be an object or null")
    return given.get(name)


def layer_types(raw: Raw) -> list[str]:
    """Returns the types of the object, whose layers are counted from 1, or every fifth with attention."""
    count, kinds = raw["num_hidden_layers"], {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
    lists = {kind: of_object(raw, name) for name, kind in kinds.items()}
    if None in lists.values():
        return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]
    places = {place - 1: kind for kind, layers in lists.items() for place in layers}
    if sorted(places) != list(range(count)):
        wanted = f"its full_attn_layers and kda_layers must be those from 1 to {count}"
        raise InvalidInput("linear_attn_config", value=raw["linear_attn_config"], wanted=wanted)
    return [places[layer] for layer in range(count)]


def parts(raw: Raw) -> dict[str, Any]:
    """Returns the size of a rotated key, and the layers without experts."""
    return {"head_dim": raw["qk_rope_head_dim"], "moe.dense_layers": without_experts(raw, 1)}
