"""Rotary embeddings in config.json: rope_theta and rope_scaling, or the newer rope_parameters, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families import Family
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.parts import ROPE_KEYS, RopeScaling
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL, _LOCAL = "partial_rotary_factor", "rope_local_base_freq"
#: Of families whose kinds of layers rotate other shares of a head.
_PARTIAL_OF_FULL = "full_attention.partial_rotary_factor"
_BETA, _ALPHA, _MSCALE = "llama_4_scaling_beta", "alpha", "short_mscale"
#: The file's name of rope_local_theta in newer files.
LOCAL_THETA = "rope_parameters.sliding_attention.rope_theta"
ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)
#: The name of longrope in Phi-3's first files.
_OLD_NAMES = {"su": "longrope"}


def read_rope(raw: Mapping[str, Any], family: Family, context: int) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that are about rotary embeddings."""
    name = "rope_scaling" if raw.get("rope_parameters") is None else "rope_parameters"
    if name == "rope_parameters" and raw.get("rope_scaling") not in (None, family.all_defaults.get("rope_scaling")):
        raise InvalidInput("both rope_scaling and rope_parameters are given; keep one.")
    given = raw.get(name)
    if given is not None and not isinstance(given, dict):
        raise InvalidInput(name, value=given, wanted="it must be an object or null")
    given, local = dict(given or {}), {}
    if _LOCAL in family.rope_keys and "full_attention" in given:
        given, local = (_of_kind(given, name, kind) for kind in ("full_attention", "sliding_attention"))
        own = {"rope_theta", _PARTIAL} if _PARTIAL_OF_FULL in family.rope_keys else {"rope_theta"}
        inert = {"rope_type": "default", _PARTIAL: 1}
        if any(value is not None and inert.get(key) != value for key, value in local.items() if key not in own):
            wanted = "this build has rope_type 'default' there, and no factors"
            raise Unsupported(f"{name}.sliding_attention", value=local, wanted=wanted)
    # How positions of pictures are dealt out over the pairs; a text has one position for all of them.
    given = {key: value for key, value in given.items() if value is not None and not key.startswith("mrope_")}
    fields = {"rope_theta": given.pop("rope_theta", _value(raw, family, "rope_theta", 10000.0))}
    is_proportional = given.get("rope_type") == "proportional"
    partial = None if is_proportional else given.pop(_PARTIAL, None)
    if _PARTIAL_OF_FULL in family.rope_keys:
        fields |= {_PARTIAL_OF_FULL: 1.0 if partial is None else partial, _PARTIAL: local.get(_PARTIAL, 1.0)}
    elif _PARTIAL in family.rope_keys:
        fields[_PARTIAL] = _value(raw, family, _PARTIAL, 1.0) if partial is None else partial
    elif partial is not None and _PARTIAL not in family.ignored and (partial != 1 or isinstance(partial, bool)):
        raise Unsupported(_PARTIAL, value=partial, wanted="this build has 1.0")
    if _LOCAL in family.rope_keys:
        place = family.rope_keys[_LOCAL]
        if place == name and local.get("rope_theta") is None:
            raise InvalidInput(LOCAL_THETA, "is missing")
        fields["rope_local_theta"] = local.get("rope_theta", raw.get(place, raw.get(_LOCAL, 10000.0)))
    fields |= _of_some(given, fields, raw, family)
    return fields | {"rope_scaling": _scaling(given, name, raw, context)}


def _of_kind(given: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
    """Returns the object of one kind of layers."""
    own = given.get(kind)
    if not isinstance(own, dict | None):
        raise InvalidInput(f"{name}.{kind}", value=own, wanted="it must be an object or null")
    return dict(own or {})


def _of_some(
    given: dict[str, Any], fields: Mapping[str, Any], raw: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Takes the keys out of the object that only some families have, and returns the fields that they set."""
    own: dict[str, Any] = {}
    if _BETA in family.rope_keys:
        given.pop("max_position_embeddings", None)
        if (beta := given.pop(_BETA, None)) is not None:
            own = {"temperature.beta": beta, "temperature.interval": given.get(_ORIGINAL)}
    if _ALPHA in family.rope_keys and given.get(_ALPHA) is not None and given.get("rope_type", "dynamic") == "dynamic":
        # A larger base for all lengths (HunYuan); the other keys of the object mean nothing with it.
        size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        own = {"rope_theta": fields["rope_theta"] * given[_ALPHA] ** (size / (size - 2))}
        given.clear()
    if _MSCALE in family.rope_keys and _MSCALE in given:
        factors = {given.pop(_MSCALE), given.pop("long_mscale", None)}
        if len(factors) > 1:
            raise Unsupported("short_mscale", value=factors, wanted="this build has the same as long_mscale")
        given["attention_factor"] = factors.pop()
    return own


def write_rope(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json for these rotary embeddings."""
    if config.position_embedding == "none" and "position_embedding" not in family.options:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    if config.position_embedding != "rope":
        return {}
    written: dict[str, Any] = {family.rope_keys.get("rope_theta", "rope_theta"): config.rope_theta}
    if _PARTIAL in family.rope_keys:
        written[family.rope_keys[_PARTIAL]] = config.partial_rotary_factor
    scaling = config.rope_scaling
    if family.rope_keys.get(_LOCAL) == "rope_parameters":
        full = {"rope_type": "default", **(_scaling_values(scaling) if scaling else {}), **written}
        local: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_local_theta}
        if _PARTIAL_OF_FULL in family.rope_keys and config.full_attention is not None:
            full[_PARTIAL], local[_PARTIAL] = config.full_attention.partial_rotary_factor, config.partial_rotary_factor
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    if _LOCAL in family.rope_keys:
        written[family.rope_keys[_LOCAL]] = config.rope_local_theta
    if scaling is None:
        return written | {"rope_scaling": {"rope_type": "default"} if "rope_scaling" in family.all_defaults else None}
    if scaling.rope_type == "longrope":
        written[_ORIGINAL] = scaling.original_max_position_embeddings
    values = _scaling_values(scaling)
    if config.temperature is not None and _BETA in family.rope_keys:
        values[_BETA] = config.temperature.beta
    if _MSCALE in family.rope_keys:
        values |= dict.fromkeys((_MSCALE, "long_mscale"), values.pop("attention_factor", None))
    return written | {"rope_scaling": values}


def _scaling_values(scaling: RopeScaling) -> dict[str, Any]:
    needed, possible = ROPE_KEYS[scaling.rope_type]
    values = {key: getattr(scaling, key) for key in (*needed, *possible)}
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": scaling.rope_type} | {key: value for key, value in lists.items() if value is not None}


def _value(raw: Mapping[str, Any], family: Family, name: str, default: float) -> Any:
    return raw.get(family.rope_keys.get(name, name), raw.get(name, default))


def _scaling(given: dict[str, Any], name: str, raw: Mapping[str, Any], context: int) -> RopeScaling | None:
    old = given.pop("type", "default")
    rope_type = given.pop("rope_type", old)
    rope_type = _OLD_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise Unsupported(f"{name}.rope_type", value=rope_type, wanted=f"this build has {', '.join(ROPE_KEYS)}")
    needed, possible = ROPE_KEYS[rope_type]
    if rope_type == "proportional":
        given = {"factor": 1.0, _PARTIAL: 1.0, **given}
    if rope_type in ("llama3", "yarn", "longrope"):
        # It takes precedence over the object, as in transformers.
        original = raw.get(_ORIGINAL)
        given[_ORIGINAL] = given.get(_ORIGINAL, context) if original is None else original
        if rope_type == "longrope" and isinstance(given[_ORIGINAL], int) and given[_ORIGINAL] > 0:
            given.setdefault("factor", max(context / given[_ORIGINAL], 1.0))
    if not set(needed) <= set(given) or set(given) - {*needed, *possible}:
        also = f" and may have {sorted(possible)}" if possible else ""
        wanted = f"it needs {sorted(needed)}{also}"
        raise InvalidInput(name, f"of type {rope_type!r} has the keys {shown(sorted(given))}", wanted)
    if rope_type == "default":
        return None
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return RopeScaling(rope_type=rope_type, **values)
