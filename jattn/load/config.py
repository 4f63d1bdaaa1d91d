"""config.json to ModelConfig and back: every key is known by name, everything else is refused."""

from __future__ import annotations

from typing import Any

from jattn.models.config import ModelConfig, RopeScaling
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import QUERY_DTYPES

__all__ = ["parse_config", "render_config"]

_NAME = "config.json"
_MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL = (
    "architectures",
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
)
#: Keys of Hugging Face's and other writers that do not change what inference computes, whatever their value.
_IGNORED = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "chunk_size_feed_forward",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
)
#: Keys with one value under which the model is the one that is computed here.
_INERT = {
    "add_cross_attention": False,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Builds the config of a supported model from the object in its config.json.

    `dtype` is the one in which the file says its weights are stored (float32 when it says nothing).

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
    architecture = _architecture(raw)
    raw = _without_inert(raw)
    _check_keys(raw)
    if raw.get("head_dim") is None:
        raw = {**raw, "head_dim": _derived_head_dim(raw)}
    if raw.get("num_key_value_heads") is None:
        raw = {**raw, "num_key_value_heads": raw["num_attention_heads"]}
    rope_theta, rope_scaling = _rope(raw)
    for name in ("attention_bias", "mlp_bias"):
        if architecture != "LlamaForCausalLM" and raw.get(name, False) is not False:
            raise Unsupported(f"{_NAME}: {name} is {_short(raw[name])}; {architecture} has no such option.")
    llama_bias = raw.get("attention_bias", False)
    options = {
        "sliding_window": _sliding_window(raw, architecture),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "attention_bias": True if architecture == "Qwen2ForCausalLM" else llama_bias,
        "attention_output_bias": llama_bias,
        "mlp_bias": raw.get("mlp_bias", False),
        "dtype": _stored_dtype(raw),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": token_ids(raw.get("eos_token_id"), f"{_NAME}: eos_token_id"),
    }
    options |= {name: raw[name] for name in (*_REQUIRED, "head_dim", "num_key_value_heads")}
    options |= {name: raw[name] for name in ("rms_norm_eps", "tie_word_embeddings") if name in raw}
    try:
        return ModelConfig(**options)
    except InvalidInput as error:
        raise InvalidInput(f"{_NAME}: {error}") from None


def render_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Returns the config.json object that `parse_config`, and transformers, read as this config.

    Args:
        config: of the model.
        dtype: in which the weights are stored.

    Raises:
        Unsupported: no supported architecture has this combination of options.
    """
    if config.attention_bias and not config.attention_output_bias and not config.mlp_bias:
        architecture = "Qwen2ForCausalLM"
    elif config.sliding_window is not None and not config.attention_bias and not config.mlp_bias:
        architecture = "MistralForCausalLM"
    else:
        architecture = "LlamaForCausalLM"
    rendered = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "rope_scaling": _render_rope(config.rope_scaling),
        "torch_dtype": dtype,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    same = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "bos_token_id")
    rendered |= {name: getattr(config, name) for name in (*_REQUIRED, *same)}
    if architecture == "LlamaForCausalLM":
        rendered |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if architecture == "MistralForCausalLM":
        rendered["sliding_window"] = config.sliding_window
    again = parse_config(rendered)
    for name in ("attention_bias", "attention_output_bias", "mlp_bias", "sliding_window", "head_dim"):
        if getattr(again, name) != getattr(config, name):
            raise Unsupported(
                f"config has attention_bias={config.attention_bias}, "
                f"attention_output_bias={config.attention_output_bias}, mlp_bias={config.mlp_bias}, "
                f"sliding_window={config.sliding_window}; no supported architecture of {', '.join(_MODEL_TYPES)} "
                "stores that."
            )
    return rendered


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Returns an id, a list of ids or null as a tuple; ranges are ModelConfig's to check.

    Raises:
        InvalidInput: anything else.
    """
    values = [] if value is None else value if isinstance(value, list) else [value]
    if len(values) > 64 or any(isinstance(token, bool) or not isinstance(token, int) for token in values):
        raise InvalidInput(f"{name} is {_short(value)}; it must be a token id, a list of at most 64, or null.")
    return tuple(values)


def _architecture(raw: dict[str, Any]) -> str:
    for key in ("auto_map", "quantization_config"):
        if raw.get(key) is not None:
            reason = "code from a model folder is never run" if key == "auto_map" else "quantized weights are not read"
            raise Unsupported(f"{_NAME} has {key}; {reason}.")
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise InvalidInput(f"{_NAME}: architectures is {_short(named)}; it must be a list of one name.")
    architecture = named[0]
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        raise Unsupported(
            f"{_NAME}: architectures[0] is {_short(architecture)}; this build has {', '.join(_MODEL_TYPES)}."
        )
    model_type = raw.get("model_type", _MODEL_TYPES[architecture])
    if model_type != _MODEL_TYPES[architecture]:
        raise InvalidInput(
            f"{_NAME}: model_type is {_short(model_type)}; {architecture} needs {_MODEL_TYPES[architecture]!r}."
        )
    return architecture


def _without_inert(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that say something: neither inert nor, unless the key is known, null."""
    for key in _INERT.keys() & raw.keys():
        value, inert = raw[key], _INERT[key]
        if value is not None and (value != inert or isinstance(value, bool) != isinstance(inert, bool)):
            shown = str(inert).lower() if isinstance(inert, bool) else repr(inert)
            raise Unsupported(f"{_NAME}: {key} is {_short(value)}; this build has {shown}.")
    known = {*_REQUIRED, *_OPTIONAL}
    return {key: value for key, value in raw.items() if key in known or not (key in _INERT or value is None)}


def _check_keys(raw: dict[str, Any]) -> None:
    allowed = {*_REQUIRED, *_OPTIONAL}
    unknown = sorted(set(raw) - allowed - set(_IGNORED))
    if unknown:
        shown = ", ".join(_short(key) for key in unknown[:8]) + (", ..." if len(unknown) > 8 else "")
        raise InvalidInput(
            f"{_NAME} has unknown keys: {shown}. Keys that are read: {', '.join(sorted(allowed))}. "
            f"Keys that are ignored: {', '.join(_IGNORED)}. Keys of one value: {', '.join(_INERT)}."
        )
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise InvalidInput(f"{_NAME} lacks {', '.join(missing)}.")


def _derived_head_dim(raw: dict[str, Any]) -> int:
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", num_heads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{_NAME}: {name} is {_short(value)}; it must be a positive int.")
    if hidden_size % num_heads:
        raise InvalidInput(
            f"{_NAME}: hidden_size is {hidden_size}, not a multiple of num_attention_heads ({num_heads}); "
            "give head_dim explicitly."
        )
    return hidden_size // num_heads


def _rope(raw: dict[str, Any]) -> tuple[Any, RopeScaling | None]:
    """Returns the base and the scaling from rope_theta and rope_scaling, or from the newer rope_parameters."""
    name = "rope_scaling" if raw.get("rope_parameters") is None else "rope_parameters"
    if name == "rope_parameters" and raw.get("rope_scaling") is not None:
        raise InvalidInput(f"{_NAME} has both rope_scaling and rope_parameters; keep one.")
    given = raw.get(name)
    theta = raw.get("rope_theta", 10000.0)
    if given is None:
        return theta, None
    if not isinstance(given, dict):
        raise InvalidInput(f"{_NAME}: {name} is {_short(given)}; it must be an object or null.")
    given = _without_inert(given)
    theta = given.pop("rope_theta", theta)
    rope_type = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise Unsupported(f"{_NAME}: {name}.rope_type is {_short(rope_type)}; this build has {', '.join(_ROPE_KEYS)}.")
    expected = set(_ROPE_KEYS[rope_type])
    if set(given) != expected:
        raise InvalidInput(
            f"{_NAME}: {name} of type {rope_type!r} has the keys {_short(sorted(given))}; it needs {sorted(expected)}."
        )
    try:
        return theta, RopeScaling(rope_type=rope_type, **given) if expected else None
    except InvalidInput as error:
        raise InvalidInput(f"{_NAME}: {error}") from None


def _render_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": scaling.rope_type} | {key: getattr(scaling, key) for key in _ROPE_KEYS[scaling.rope_type]}


def _sliding_window(raw: dict[str, Any], architecture: str) -> Any:
    layer_types = raw.get("layer_types")
    uniform = "sliding_attention" if architecture == "MistralForCausalLM" else "full_attention"
    if layer_types is not None and (not isinstance(layer_types, list) or any(kind != uniform for kind in layer_types)):
        raise Unsupported(f"{_NAME}: layer_types is {_short(layer_types)}; this build has all {uniform!r} here.")
    window = raw.get("sliding_window")
    if architecture == "MistralForCausalLM":
        return window
    if raw.get("use_sliding_window", False) is not False:
        raise Unsupported(f"{_NAME}: use_sliding_window is {_short(raw['use_sliding_window'])}; this build has false.")
    if window is not None and "use_sliding_window" not in raw:
        raise Unsupported(f"{_NAME}: sliding_window is {_short(window)}; {architecture} has none in this build.")
    return None


def _stored_dtype(raw: dict[str, Any]) -> str:
    given = {key: raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise InvalidInput(f"{_NAME}: torch_dtype and dtype differ ({_short(given)}).")
    name = next(iter(given.values()), "float32")
    if not isinstance(name, str) or name not in QUERY_DTYPES:
        raise Unsupported(
            f"{_NAME}: {next(iter(given))} is {_short(name)}; it must be one of {', '.join(QUERY_DTYPES)}."
        )
    return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
