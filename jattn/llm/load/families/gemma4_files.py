"""How files of Gemma 4 spell the sizes of its layers, and the parts that they switch off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families.family import Raw, every
from jattn.llm.load.families.gemma import scaled_embedding
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import last_of_each_window
from torch_core.base.errors import InvalidInput, Unsupported

PATTERN = every(6)


def types_of_layers(raw: Raw) -> list[str]:
    """Returns the types of a file without them: every sixth layer sees all, and the last one."""
    count = raw["num_hidden_layers"]
    slides = [PATTERN(layer, raw) and layer < count - 1 for layer in range(count)]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def derived_fields(raw: Raw) -> dict[str, Any]:
    """Returns the fields that follow from several keys, and takes away the parts that are switched off."""
    types, count = raw.get("layer_types") or types_of_layers(raw), raw["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != count or types[-1] != "full_attention":
        wanted = f"it has an entry for each of the {count} layers, and the last one is 'full_attention'"
        raise InvalidInput("layer_types", value=types, wanted=wanted)
    if raw["use_bidirectional_attention"] not in (None, "vision"):
        wanted = "this build has null, or 'vision', which changes no text"
        raise Unsupported("use_bidirectional_attention", value=raw["use_bidirectional_attention"], wanted=wanted)
    windows = [raw["sliding_window"] if kind == "sliding_attention" else None for kind in types]
    shared = raw["num_kv_shared_layers"]
    found: dict[str, Any] = scaled_embedding(raw) | _full_attention(raw, types)
    found["full_attention.attention_k_eq_v"] = raw["attention_k_eq_v"]
    found["kv_sharing_targets"] = last_of_each_window(windows, shared) if shared else ()
    if raw["hidden_size_per_layer_input"]:
        found["per_layer_input.num_layers"] = count
    else:
        found["per_layer_input"] = None
    return found if raw["enable_moe_block"] else {**found, "moe": None}


def written_keys(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the file that those fields came from."""
    full = config.full_attention
    return {
        "num_kv_shared_layers": sum(target is not None for target in config.kv_sharing_targets),
        "enable_moe_block": config.moe is not None,
        **({} if config.per_layer_input else {"hidden_size_per_layer_input": 0}),
        **({} if full is None else {"global_head_dim": full.head_dim, "attention_k_eq_v": full.attention_k_eq_v}),
        "num_global_key_value_heads": full.num_key_value_heads if full and full.attention_k_eq_v else None,
    }


def _full_attention(raw: Raw, types: list[str]) -> dict[str, Any]:
    """Returns the sizes of layers without a window: transformers writes them by layer, published files once."""
    k_eq_v, given = raw["attention_k_eq_v"], raw.get("per_layer_config")
    heads = (k_eq_v and raw.get("num_global_key_value_heads")) or raw["num_key_value_heads"]
    own: Mapping[str, Any] = {"head_dim": raw["global_head_dim"], "num_key_value_heads": heads}
    if given is not None:
        full = {str(layer): given.get(str(layer)) for layer, kind in enumerate(types) if kind == "full_attention"}
        own, *others = full.values()
        if given.keys() != full.keys() or not isinstance(own, dict) or any(other != own for other in others):
            wanted = "this build has one head_dim and num_key_value_heads for all layers with full attention"
            raise Unsupported("per_layer_config", value=given, wanted=wanted)
        own = {"head_dim": raw["head_dim"], "num_key_value_heads": raw["num_key_value_heads"], **own}
        if len(own) > 2:
            raise Unsupported("per_layer_config", value=given, wanted="it has head_dim and num_key_value_heads")
    return {f"full_attention.{name}": value for name, value in own.items()}
