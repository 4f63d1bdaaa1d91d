"""How files of MiMo-V2-Flash spell the sizes of both kinds of layers: transformers' way and the published one."""

from __future__ import annotations

from typing import Any

from jattn.llm.load.families.family import Raw, mlp_layer_types
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.config_fields import SIZE_LIMITS
from jattn.llm.models.parts import MAX_CONTEXT
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported

_KINDS = {"hybrid_layer_pattern": ("full_attention", "sliding_attention"), "moe_layer_freq": ("dense", "sparse")}
_TYPES = {"hybrid_layer_pattern": "layer_types", "moe_layer_freq": "mlp_layer_types"}
#: Keys of layers with a window, and the one that has the same value here.
_SAME = {"swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim"}
_SINKS = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
_UNUSED = ("attention_chunk_size", "hybrid_block_size", "hidden_dropout", "rope_theta", "rope_scaling")


def layer_types(raw: Raw) -> list[str]:
    """Returns the types of a file without them: the first layer and every sixth one see all."""
    layers = range(raw["num_hidden_layers"])
    return ["full_attention" if not layer or (layer + 1) % 6 == 0 else "sliding_attention" for layer in layers]


def sizes(raw: Raw) -> dict[str, Any]:
    """Returns the sizes of layers with a window, which have twice the key heads, and of the others."""
    heads = raw["num_key_value_heads"]
    return {
        "num_key_value_heads": 2 * heads,
        "full_attention.num_key_value_heads": heads,
        "full_attention.head_dim": raw["head_dim"],
        "full_attention.attention_sinks": False,
        "moe.dense_layers": (0,),
    }


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of the file that those fields came from."""
    return {**mlp_layer_types(config), "num_key_value_heads": config.num_key_value_heads // 2}


def respelled(raw: Raw) -> Raw:
    """Returns the values of a published file as transformers spells them."""
    if "hybrid_layer_pattern" not in raw:
        return raw
    found = {name: value for name, value in raw.items() if name not in _UNUSED}
    for name, kinds in _KINDS.items():
        given = found.pop(name, None)
        if not isinstance(given, list) or any(each not in (0, 1) or not isinstance(each, int) for each in given):
            raise InvalidInput(name, value=given, wanted="it must have 0 or 1 for each layer")
        found[_TYPES[name]] = [kinds[each] for each in given]
    for name, own in _SAME.items():
        if found.pop(name, found.get(own)) != found.get(own):
            raise Unsupported(name, value=raw[name], wanted=f"this build has {own} ({found.get(own)})")
    for name, value in _SINKS.items():
        if found.pop(name, value) is not value:
            raise Unsupported(name, value=raw[name], wanted=f"this build has {str(value).lower()}")
    heads, own = found.pop("swa_num_key_value_heads", None), found.get("num_key_value_heads")
    if own is not None:
        check_int("num_key_value_heads", own, 1, SIZE_LIMITS["num_key_value_heads"])
    if heads is not None and own is not None and heads != 2 * own:
        raise Unsupported("swa_num_key_value_heads", value=heads, wanted=f"this build has {2 * own}")
    if raw.get("rope_scaling") is not None or found.pop("attention_projection_layout", "split") != "split":
        raise Unsupported("rope_scaling", "or attention_projection_layout is given", "this build has neither")
    share, window = found.pop("partial_rotary_factor", 1.0), found.pop("sliding_window_size", None)
    if window is not None:
        check_int("sliding_window_size", window, 1, MAX_CONTEXT)
        # Without the token itself.
        found["sliding_window"] = window + 1
    if "layernorm_epsilon" in found:
        found["rms_norm_eps"] = found.pop("layernorm_epsilon")
    thetas = {"full_attention": raw.get("rope_theta"), "sliding_attention": found.pop("swa_rope_theta", None)}
    found["rope_parameters"] = {
        kind: {"rope_theta": theta, "partial_rotary_factor": share} for kind, theta in thetas.items()
    }
    return found
