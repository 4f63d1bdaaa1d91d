"""The metadata of a GGUF file as a config.json and as generation settings, by the spelling of its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.llm.load.families import Family, known_families
from jattn.llm.load.families.gguf import GGUF_FIELDS, GGUF_KEYS
from jattn.llm.load.generation import GenerationDefaults
from jattn.llm.load.gguf.metadata import Metadata
from jattn.llm.load.gguf.tokenizer import end_ids
from jattn.llm.load.tensor_file import TensorFile, read_tensor
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

#: Tensors that are part of the config: factors of rotary frequencies.
ROPE_TENSORS = r"rope_freqs\.weight|rope_factors_(long|short)\.weight"
_ORIGINAL = "original_max_position_embeddings"
#: Keys that are read here, and keys that do not change the results.
_READ = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scale_linear")
_IGNORED = ("rope.scaling.finetuned", "tensor_data_layout", "attention.causal", "expert_group_count")
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": _ORIGINAL,
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
#: Llama 3.1's scaling, which files have as factors of frequencies alone.
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}


def family_of_gguf(metadata: Metadata) -> Family:
    """Returns the family that a file names; one with experts if it has some."""
    name = metadata.text("general.architecture", "")
    families = [family for family in known_families().values() if family.gguf is not None]
    named = [family for family in families if family.gguf is not None and family.gguf.architecture == name]
    has_experts = bool(metadata.number(f"{name}.expert_count", 0))
    found = next((family for family in named if family.has_experts == has_experts), None)
    if found is None:
        known = ", ".join(sorted({family.gguf.architecture for family in families if family.gguf is not None}))
        problem = f"is {shown(name)}" + (f" with expert_count {shown(has_experts)}" if named else "")
        raise Unsupported("general.architecture", problem, f"this build reads {known}")
    return found


def raw_config(metadata: Metadata, weights: TensorFile) -> dict[str, Any]:
    """Returns the object of a config.json that `jattn.llm.load.parse_config` reads.

    Sizes of the vocabulary, biases and the tied head follow from the tensors. Its `torch_dtype` is the type of all
    matrices, or bfloat16 if they are quantised.

    Raises:
        InvalidInput: a missing or wrong value; the message names the key of the file.
        Unsupported: an architecture, a key or a value that this build does not serve.
    """
    family = family_of_gguf(metadata)
    prefix = f"{family.gguf.architecture}." if family.gguf is not None else ""
    given = {key.removeprefix(prefix): _plain(value) for key, value in metadata.items() if key.startswith(prefix)}
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": _dtype(weights),
        "bos_token_id": metadata.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(end_ids(metadata)) or None,
    }
    keys = {name: key for key, entry in family.all_keys.items() for name in entry.fields}
    known = {*GGUF_FIELDS, *GGUF_KEYS, *_READ, *_IGNORED, *_SCALING, "rope.scaling.type"}
    for name, value in given.items():
        field = GGUF_FIELDS.get(name)
        # A key that no model of the family has says something that is not computed.
        if name not in known or (field is not None and field not in keys):
            wanted = f"hf_overrides={{{prefix + name!r}: None}} loads without it, if the model is the same without"
            raise Unsupported(prefix + name, value=value, wanted=wanted)
        if field is not None:
            raw[keys[field]] = _uniform(prefix + name, value)
        elif name in GGUF_KEYS:
            raw[GGUF_KEYS[name]] = value
    _add_shapes(raw, keys, weights)
    head_dim = _head_dim(raw, keys)
    if "head_dim" in keys:
        raw["head_dim"] = head_dim
    if given.get("attention.value_length", head_dim) != head_dim:
        wanted = f"this build has heads of values as long as those of keys ({head_dim})"
        raise Unsupported(f"{prefix}attention.value_length", value=given["attention.value_length"], wanted=wanted)
    if family.options.get("position_embedding", "rope") == "rope":
        raw.setdefault("rope_theta", 10000.0)
        raw |= _rotary_part(given, head_dim, family, prefix) | _scaling(given, weights, raw, prefix)
    if not isinstance(raw.get("sliding_window_pattern"), int | None):
        flags = raw.pop("sliding_window_pattern")
        raw["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
    for name, value in (family.gguf.values if family.gguf is not None else {}).items():
        try:
            raw[name] = value(raw) if callable(value) else value
        except (TypeError, KeyError, ZeroDivisionError):
            raise InvalidInput(f"{prefix}{name}", "does not follow from the other sizes") from None
    return raw


def _plain(value: Any) -> Any:
    """Returns JSON's values; of a float32 the shortest decimal that it is the nearest float32 of."""
    if isinstance(value, float) and np.float32(value) == value:
        return float(str(np.float32(value)))
    return value.tolist() if isinstance(value, np.ndarray) else value


def _uniform(key: str, value: Any) -> Any:
    """Returns the value of all layers."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise Unsupported(key, "differs between layers", "this build has one value for all")
    return value[0]


def _dtype(weights: TensorFile) -> str:
    found = {stored.code: stored.dtype for stored in weights.tensors.values() if len(stored.shape) > 1}
    (code, dtype), *others = found.items() or [("", None)]
    return str(dtype) if code in ("F32", "F16", "BF16") and not others else "bfloat16"


def _add_shapes(raw: dict[str, Any], keys: Mapping[str, str], weights: TensorFile) -> None:
    """Adds the keys that follow from the tensors."""
    embedding = weights.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidInput("tensor 'token_embd.weight'", "is not in the file")
    raw[keys["vocab_size"]] = embedding.shape[0]
    raw[keys["tie_word_embeddings"]] = "output.weight" not in weights.tensors
    biases = {"attention_bias": ("attn_q", "attn_qkv"), "mlp_bias": ("ffn_up",)}
    for field, names in biases.items():
        if field in keys and keys[field] not in raw:
            raw[keys[field]] = any(f"blk.0.{name}.bias" in weights.tensors for name in names)


def _head_dim(raw: Mapping[str, Any], keys: Mapping[str, str]) -> Any:
    if "head_dim" in keys and raw.get(keys["head_dim"]) is not None:
        return raw[keys["head_dim"]]
    width, heads = raw.get(keys["hidden_size"]), raw.get(keys["num_attention_heads"])
    # A wrong value is refused as a size.
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _rotary_part(given: Mapping[str, Any], head_dim: Any, family: Family, prefix: str) -> dict[str, Any]:
    rotated = given.get("rope.dimension_count", head_dim)
    if rotated == head_dim or not isinstance(head_dim, int):
        return {}
    name = f"{prefix}rope.dimension_count"
    if not isinstance(rotated, int) or not 0 < rotated <= head_dim:
        raise InvalidInput(name, value=rotated, wanted=f"it must be from 1 to the size of a head ({head_dim})")
    if "partial_rotary_factor" not in family.rope_keys:
        raise Unsupported(name, value=rotated, wanted=f"this build rotates whole heads ({head_dim}) here")
    return {"partial_rotary_factor": rotated / head_dim}


def _scaling(given: Mapping[str, Any], weights: TensorFile, raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns rope_scaling, if the file has a scaling, from its keys or from the tensors with factors."""
    kind = given.get("rope.scaling.type", "none")
    values = {name: given[key] for key, name in _SCALING.items() if key in given}
    if "rope_freqs.weight" in weights.tensors:
        return _llama3(_factors(weights, "rope_freqs.weight"), raw["rope_theta"])
    if "rope_factors_long.weight" in weights.tensors:
        return _longrope(values, weights, raw)
    if kind == "none" and given.get("rope.scale_linear", 1.0) != 1.0:
        kind, values = "linear", {"factor": given["rope.scale_linear"]}
    if kind == "none":
        return {}
    if kind == "linear":
        values = {"factor": values.get("factor")}
    elif kind == "yarn":
        if values.pop("attention_factor", 1.0) != 1.0:
            wanted = "this build has 1 with yarn"
            raise Unsupported(
                f"{prefix}rope.scaling.attn_factor", value=given["rope.scaling.attn_factor"], wanted=wanted
            )
        values.setdefault(_ORIGINAL, raw.get("max_position_embeddings"))
    else:
        wanted = "this build reads none, linear, yarn, and longrope with its tensors of factors"
        raise Unsupported(f"{prefix}rope.scaling.type", value=kind, wanted=wanted)
    return {"rope_scaling": {"rope_type": kind, **values}}


def _factors(weights: TensorFile, name: str) -> np.ndarray:
    stored = weights.tensors.get(name)
    if stored is None or len(stored.shape) != 1 or stored.shape[0] > 1 << 10:
        raise InvalidInput(f"tensor {name!r}", "is missing or no list of factors", "pairs of a head have one each")
    found = np.asarray(read_tensor(weights, name), np.float32)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise InvalidInput(f"tensor {name!r}", "has factors that are not finite and above 0")
    return found


def _longrope(values: dict[str, Any], weights: TensorFile, raw: Mapping[str, Any]) -> dict[str, Any]:
    lists = {f"{kind}_factor": _factors(weights, f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    original, context = values.get(_ORIGINAL), raw.get("max_position_embeddings")
    scaling: dict[str, Any] = {name: list(map(_plain, found.tolist())) for name, found in lists.items()}
    attention = values.get("attention_factor")
    if attention is not None and isinstance(original, int) and isinstance(context, int) and original > 1:
        usual = math.sqrt(1 + math.log(max(context / original, 1)) / math.log(original))
        if not math.isclose(attention, usual, rel_tol=1e-5):
            scaling["attention_factor"] = attention
    return {"rope_scaling": {"rope_type": "longrope", **scaling}, _ORIGINAL: original}


def _llama3(factors: np.ndarray, theta: Any) -> dict[str, Any]:
    """Returns Llama 3.1's scaling with these factors; its formula must give them."""
    largest = float(factors.max())
    if largest == 1:
        return {}
    low, high, original = _LLAMA3.values()
    wavelengths = 2 * math.pi * float(theta) ** (np.arange(len(factors)) / len(factors))
    share = ((original / wavelengths - low) / (high - low)).clip(0, 1)
    if not np.allclose(1 / ((1 - share) / largest + share), factors, rtol=1e-4):
        wanted = f"this build reads the factors of Llama 3.1, of a first context of {original} tokens"
        raise Unsupported("tensor 'rope_freqs.weight'", "has other factors", wanted)
    return {"rope_scaling": {"rope_type": "llama3", "factor": largest, **_LLAMA3}}


#: Keys of the metadata, and the fields of `GenerationDefaults` that they set.
_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def generation_defaults_of_gguf(metadata: Metadata) -> GenerationDefaults:
    """Returns the values of general.sampling, and the special tokens.

    Raises:
        InvalidInput: a value out of range; the message names the key of the file.
    """
    given: dict[str, Any] = {field: metadata[key] for key, field in _KEYS.items() if key in metadata}
    ends = end_ids(metadata)
    try:
        return GenerationDefaults(
            **given, bos_token_id=metadata.number("tokenizer.ggml.bos_token_id"), eos_token_ids=ends or None
        )
    except InvalidInput as error:
        name = next((key for key, field in _KEYS.items() if field == error.argument), None)
        raise (error if name is None else error.renamed(name)) from None
