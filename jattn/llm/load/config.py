"""config.json to ModelConfig and back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from jattn.llm.load.config_keys import FILE, REQUIRED_FIELDS, checked_keys, family_of_file, language_part
from jattn.llm.load.families import Family, known_families
from jattn.llm.load.families.family import Key, Raw
from jattn.llm.load.generation import forced_token, token_ids
from jattn.llm.load.rope import LOCAL_THETA, read_rope, write_rope
from jattn.llm.models.config import ModelConfig
from jattn.llm.models.config_fields import PARTS, SIZE_LIMITS
from jattn.llm.models.parts import MAX_CONTEXT
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import ArgumentError, InvalidInput, JattnError, Unsupported
from torch_core.base.limits import limits_of
from torch_core.base.specs import QUERY_DTYPES

#: Fields that an encoder does not have.
_OF_LOGITS = ("decoder_start_token_id", "forced_bos_token_id", "logits_bias", "logits_scale", "tie_word_embeddings")

_LONGEST_WINDOW = int(limits_of(ModelConfig)["sliding_window"].high or 0)


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Builds the config of a supported model from the object in its config.json.

    `dtype` is the file's dtype of stored weights (float32 if the file has none). Missing keys have transformers'
    defaults.

    Args:
        raw: the parsed JSON object; not changed.

    Raises:
        InvalidInput: a missing, unknown or wrong value; the message names the key.
        Unsupported: a valid model that this build does not serve.

    Example:
        >>> raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64,
        ...        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        ...        "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
        >>> config = parse_config(raw)
        >>> config.head_dim, config.num_key_value_heads, config.dtype
        (16, 4, 'bfloat16')
    """
    family = family_of_file(raw)
    raw = checked_keys(language_part(raw, family), family)
    _, is_served = forced_token(raw.get("forced_eos_token_id"))
    if not is_served:
        warnings.warn(f"{FILE} has forced_eos_token_id, whose effect is missing here.", stacklevel=2)
    try:
        return _built(raw, family)
    except (InvalidInput, Unsupported) as error:
        raise _by_key(error, family, raw).under(FILE) from None
    except _OF_ANOTHER_KIND as error:
        if (name := _first_of_another_kind(raw, family)) is not None:
            raise InvalidInput(name, value=raw[name], wanted=_ANOTHER_KIND).under(FILE) from error
        raise InvalidInput(f"{FILE}: values of {family.architecture} do not fit each other ({error}).") from None


def render_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Returns the config.json object that `parse_config`, and transformers, read as this config.

    It is of the architecture that the config was read as; a config that was built by hand becomes the first known one
    that has its options.

    Args:
        config: config of the model.
        dtype: dtype of the stored weights.

    Raises:
        Unsupported: no supported architecture has this combination of options.
    """
    return _rendered(config, dtype)[1]


def family_of(config: ModelConfig) -> Family:
    """Returns the family that a config was read as, or under which `render_config` stores one built by hand."""
    known = known_families()
    return known[config.architecture] if config.architecture in known else _rendered(config, config.dtype)[0]


def _rendered(config: ModelConfig, dtype: str) -> tuple[Family, dict[str, Any]]:
    known = known_families()
    # Weights of norms would be lost.
    others = [family for family in known.values() if not family.norms_without_weights(config)]
    tried = [known[config.architecture]] if config.architecture in known else others
    differing: list[str] = []
    for family in tried:
        rendered = _render(config, family, dtype)
        try:
            again = parse_config(rendered)
        except (InvalidInput, Unsupported):
            continue
        wanted = dataclasses.replace(config, dtype=dtype)
        if again == wanted:
            return family, rendered
        fields = [field.name for field in dataclasses.fields(ModelConfig) if field.compare]
        found = [name for name in fields if getattr(again, name) != getattr(wanted, name)]
        differing = min(differing or found, found, key=len)
    asked = ", ".join(f"{name}={shown(getattr(config, name))}" for name in differing) or "options"
    which = f"{tried[0].architecture} does not store" if len(tried) == 1 else "no supported architecture stores"
    raise Unsupported("config", f"has {asked}", f"{which} that")


def _render(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    rendered: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "forced_eos_token_id": config.forced_eos_token_id,
        # transformers' own default may lie outside the vocabulary.
        "pad_token_id": None,
        **family.inert,
        **family.derived,
    }
    for name, key in family.all_keys.items():
        place, _, attribute = key.fields[0].rpartition(".")
        source = getattr(config, place) if place else config
        if source is not None:
            rendered[name] = key.write(getattr(source, attribute))
    written = rendered | write_rope(config, family) | _write_layers(config, family)
    return written if family.write is None else {**written, **family.write(config)}


def _built(raw: Raw, family: Family) -> ModelConfig:
    options = dict(family.options)
    for name, key in family.all_keys.items():
        if name in raw:
            options |= dict.fromkeys(key.fields, _read(name, key, raw[name]))
    # Before anything is counted out, layer by layer.
    for name in REQUIRED_FIELDS:
        check_int(name, options[name], 1, SIZE_LIMITS[name])
    if options.get("num_key_value_heads") is None:
        options["num_key_value_heads"] = options["num_attention_heads"]
    if options.get("head_dim") is None:
        options["head_dim"] = _derived_head_dim(options)
    types = _layer_types(raw, family, options["num_hidden_layers"])
    if family.derive is not None:
        options |= family.derive(raw)
    options |= read_rope(raw, family, options["max_position_embeddings"]) | _layers(raw, family, types)
    options["dtype"] = _stored_dtype(raw)
    parts = {part: _popped(options, f"{part}.") for part in (*PARTS, "encoder")}
    for part, kind in PARTS.items():
        # A family may take a part away.
        if parts[part] and options.get(part, part) is not None:
            options[part] = kind(**parts[part])
    if parts["encoder"]:
        options["encoder"] = _encoder(options, parts["encoder"])
    return ModelConfig(
        **options,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
        forced_eos_token_id=forced_token(raw.get("forced_eos_token_id"))[0],
        architecture=family.architecture,
    )


def _by_key(error: ArgumentError, family: Family, raw: Raw) -> ArgumentError:
    """Returns the error of a field under the file's name of it, and after that name if the file's value is another."""
    name = error.argument or ""
    if name == "rope_local_theta" and raw.get("rope_parameters") is not None:
        return error.renamed(LOCAL_THETA, old=name)
    fields = {name, *(f"{part}.{name}" for part in PARTS)}
    own = [key for key, entry in family.all_keys.items() if key in raw and fields & {*entry.fields}]
    plain = next((key for key in own if family.all_keys[key].is_plain), None)
    if plain is None and own and name not in own:
        return error.under(own[0])
    return error.renamed(plain or name, old=name)


def _popped(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    own = [name for name in options if name.startswith(prefix)]
    return {name.removeprefix(prefix): options.pop(name) for name in own}


def _encoder(options: Mapping[str, Any], own: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a decoder's encoder: the same except for its own keys and the fields about logits."""
    shared = {name: value for name, value in options.items() if name not in _OF_LOGITS}
    try:
        return ModelConfig(**{**shared, **own, "is_encoder": True})
    except (InvalidInput, Unsupported) as error:
        raise type(error)(f"of the encoder, {error}", argument=f"encoder.{error.argument}") from None


#: The exceptions of a function of a family that meets a value of another kind.
_OF_ANOTHER_KIND = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
_ANOTHER_KIND = "its values here are of another kind"


def _read(name: str, key: Key, value: Any) -> Any:
    """Returns a field's value; one of another kind than the family's reader takes is refused by its key."""
    try:
        return key.read(value)
    except JattnError:
        raise
    except _OF_ANOTHER_KIND as error:
        raise InvalidInput(name, value=value, wanted=_ANOTHER_KIND) from error


def _first_of_another_kind(raw: Raw, family: Family) -> str | None:
    """Returns the first key without whose value the rest of the file can be read."""
    for name in raw:
        default = family.all_defaults.get(name)
        try:
            _built({**raw, name: None if callable(default) else default}, family)
        except (JattnError, *_OF_ANOTHER_KIND):
            continue
        return name
    return None


def _derived_head_dim(options: Mapping[str, Any]) -> int:
    hidden_size, num_heads = options["hidden_size"], options["num_attention_heads"]
    if hidden_size % num_heads:
        problem = f"is {hidden_size}, not a multiple of num_attention_heads ({num_heads})"
        raise InvalidInput("hidden_size", problem, "give head_dim explicitly")
    return hidden_size // num_heads


def _layer_types(raw: Raw, family: Family, count: int) -> list[str]:
    """Returns the file's types of layers, or the family's; empty without these."""
    types = raw.get("layer_types")
    if types is None and family.default_types is not None:
        types = family.default_types(raw)
    if types is None:
        return []
    known = _types_of(family)
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(not isinstance(kind, str) or kind not in known for kind in types)
    ):
        *names, last = map(repr, known)
        wanted = f"it must have {', '.join(names)} or {last} for each of the {count} layers"
        raise InvalidInput("layer_types", value=types, wanted=wanted)
    return types


def _types_of(family: Family) -> dict[str, str]:
    return {"full_attention": "attention", "sliding_attention": "attention", **family.layer_types}


def _layers(raw: Raw, family: Family, types: list[str]) -> dict[str, Any]:
    """Returns the types of layers, and the window of all or of each, from the file's keys and the family's pattern."""
    count = raw[next(name for name, key in family.all_keys.items() if key.field == "num_hidden_layers")]
    is_used = raw.get("use_sliding_window", True)
    if not isinstance(is_used, bool):
        raise InvalidInput("use_sliding_window", value=is_used, wanted="it must be true or false")
    mixed = tuple(_types_of(family)[kind] for kind in types)
    own: dict[str, Any] = {"layer_types": mixed} if any(kind != "attention" for kind in mixed) else {}
    if (kinds := raw.get("mlp_layer_types")) is not None and family.has_experts:
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
            wanted = f"it must have 'dense' or 'sparse' for each of the {count} layers"
            raise InvalidInput("mlp_layer_types", value=kinds, wanted=wanted)
        own["moe.dense_layers"] = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return own | _windows(raw, family, count)


def _windows(raw: Mapping[str, Any], family: Family, count: int) -> dict[str, Any]:
    window, types, is_used = raw.get("sliding_window"), raw.get("layer_types"), raw.get("use_sliding_window", True)
    if family.two_sided_window:
        check_int(family.two_sided_window, raw[family.two_sided_window], 0, 2 * MAX_CONTEXT - 2)
        window = raw[family.two_sided_window] // 2 + 1
    if family.windows is None:
        asked = {
            "sliding_window": window is not None and raw.get("use_sliding_window") is not False,
            "use_sliding_window": raw.get("use_sliding_window") is True,
            "layer_types": "sliding_attention" in (types or ()),
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise Unsupported(name, value=raw[name], wanted=f"{family.architecture} has no windows")
        return {}
    if window is None or not is_used:
        return {}
    if not family.two_sided_window:
        check_int("sliding_window", window, 1, _LONGEST_WINDOW)
    if types is not None and family.windows != "all":
        slides = [kind == "sliding_attention" for kind in types]
    else:
        slides = [family.windows == "all" or family.windows(layer, raw) for layer in range(count)]  # type: ignore[operator]
    if all(slides):
        return {"sliding_window": window}
    return {"layer_windows": tuple(window if slide else None for slide in slides)} if any(slides) else {}


def _write_layers(config: ModelConfig, family: Family) -> dict[str, Any]:
    windows = [config.window_of(layer) for layer in range(config.num_hidden_layers)]
    window = next((window for window in windows if window is not None), None)
    written: dict[str, Any] = {} if family.windows is None else {"sliding_window": window}
    if family.two_sided_window:
        written = {} if window is None else {family.two_sided_window: 2 * (window - 1)}
    if family.windows is not None and "use_sliding_window" in family.all_defaults:
        written["use_sliding_window"] = window is not None
    if family.windows not in (None, "all") or (family.has_states and "layer_types" not in family.absent):
        names = {kind: name for name, kind in reversed([*family.layer_types.items()])}
        names.setdefault("attention", "full_attention")
        mixed = config.layer_types or ("attention",) * config.num_hidden_layers
        types = zip(windows, mixed, strict=True)
        written["layer_types"] = [names.get(kind) if window is None else "sliding_attention" for window, kind in types]
    return written


def _stored_dtype(raw: Mapping[str, Any]) -> str:
    given = {key: raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise InvalidInput("torch_dtype", f"and dtype differ ({shown(given)})")
    name = next(iter(given.values()), "float32")
    if not isinstance(name, str) or name not in QUERY_DTYPES:
        raise Unsupported(next(iter(given)), value=name, wanted=f"it must be one of {', '.join(QUERY_DTYPES)}")
    return name
