"""config.json to ModelConfig and back: every key is known by name, everything else is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.load.families import Family, known_families, nearest_family
from jattn.load.generation import token_ids
from jattn.load.rope import ROPE_NAMES, read_rope, write_rope
from jattn.models.config import SIZE_LIMITS, ModelConfig
from jattn.models.parts import LatentConfig, MoEConfig
from torch_core.checks import check_int, shown
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import QUERY_DTYPES

__all__ = ["family_of", "parse_config", "render_config"]

_NAME = "config.json"
#: Fields that every file sets, under whatever key.
_REQUIRED_FIELDS = tuple(name for name in SIZE_LIMITS if name not in ("num_key_value_heads", "head_dim"))
#: What an encoder does not have.
_OF_LOGITS = ("decoder_start_token_id", "logits_bias", "logits_scale", "tie_word_embeddings")
#: Of the parts that a family may have, what none is made without.
_REQUIRED_OF_PARTS = tuple(
    f"{part}.{field.name}"
    for part, kind in (("moe", MoEConfig), ("latent", LatentConfig))
    for field in dataclasses.fields(kind)
    if field.default is dataclasses.MISSING
)
#: How weights may be quantised; they are read as numbers of the model's dtype.
QUANT_METHODS = ("fp8", "mxfp4", "compressed-tensors")
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")
#: Keys that every file may have besides those that set a field.
_STRUCTURE = (
    "architectures",
    "model_type",
    *ROPE_NAMES,
    *_WINDOW_KEYS,
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
)
#: What is read by the functions of a family.
_DERIVED = ("decoder_sparse_step", "mlp_layer_types", "no_rope_layers", "no_rope_layer_interval")
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
#: Keys of Hugging Face's and other writers that do not change what inference computes, whatever their value.
_IGNORED = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "activation_dropout",
    "add_bias_logits",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "gradient_checkpointing",
    "hidden_dropout_prob",
    "attention_softmax_in_fp32",
    "attn_pdrop",
    "auto_map",
    "aux_loss_alpha",
    "bias_dropout_fusion",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classif_dropout",
    "classifier_dropout",
    "decoder_layerdrop",
    "dense_act_fn",
    "dropout",
    "dropout_rate",
    "early_stopping",
    "embd_pdrop",
    "embedding_dropout",
    "encoder_layerdrop",
    "ep_size",
    "extra_pos_embeddings",
    "finetuning_task",
    "force_bos_token_to_be_generated",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initial_context_length",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_gated_act",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "masked_softmax_fusion",
    "max_length",
    "max_window_layers",
    "min_length",
    "n_ctx",
    "no_repeat_ngram_size",
    "num_beams",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "offset_alibi",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "seq_length",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torchscript",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
)
#: Keys with one value under which the model is the one that is computed here.
_INERT = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Builds the config of a supported model from the object in its config.json.

    `dtype` is the one in which the file says its weights are stored (float32 when it says nothing). What the file
    leaves out has the value that transformers gives it.

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
    family = _family(raw)
    raw = _checked_keys(raw, family)
    options = dict(family.options)
    for name, key in family.all_keys.items():
        if name in raw:
            options |= dict.fromkeys(key.fields, key.read(raw[name]))
    # Before anything is counted out, layer by layer.
    for name in _REQUIRED_FIELDS:
        check_int(f"{_NAME}: {name}", options[name], 1, SIZE_LIMITS[name])
    if options.get("num_key_value_heads") is None:
        options["num_key_value_heads"] = options["num_attention_heads"]
    if options.get("head_dim") is None:
        options["head_dim"] = _derived_head_dim(options)
    try:
        if family.derive is not None:
            options |= family.derive(raw)
        options |= read_rope(raw, family, options["max_position_embeddings"]) | _windows(raw, family)
        options["dtype"] = _stored_dtype(raw)
        parts = {part: _popped(options, f"{part}.") for part in ("moe", "latent", "encoder")}
        for part, kind in (("moe", MoEConfig), ("latent", LatentConfig)):
            if parts[part]:
                options[part] = kind(**parts[part])
        if parts["encoder"]:
            options["encoder"] = _encoder(options, parts["encoder"])
        return ModelConfig(
            **options,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
            architecture=family.architecture,
        )
    except (InvalidInput, Unsupported) as error:
        raise type(error)(f"{_NAME}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise InvalidInput(f"{_NAME}: values of {family.architecture} do not fit each other ({error}).") from None


def render_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Returns the config.json object that `parse_config`, and transformers, read as this config.

    It is of the architecture that the config was read as; a config that was built by hand becomes the first known one
    that has its options.

    Args:
        config: of the model.
        dtype: in which the weights are stored.

    Raises:
        Unsupported: no supported architecture has this combination of options.
    """
    return _rendered(config, dtype)[1]


def family_of(config: ModelConfig) -> Family:
    """Returns the family that a config was read as, or under which `render_config` stores one that was built by hand.

    Raises:
        Unsupported: none has this combination of options.
    """
    known = known_families()
    return known[config.architecture] if config.architecture in known else _rendered(config, config.dtype)[0]


def _rendered(config: ModelConfig, dtype: str) -> tuple[Family, dict[str, Any]]:
    known = known_families()
    tried = [known[config.architecture]] if config.architecture in known else list(known.values())
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
    raise Unsupported(
        f"config has {asked}; no supported architecture of {', '.join(f.architecture for f in tried)} stores that."
    )


def _render(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    rendered: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        # transformers' own default may lie outside the vocabulary.
        "pad_token_id": None,
        **family.inert,
    }
    for name, key in family.all_keys.items():
        place, _, attribute = key.fields[0].rpartition(".")
        source = getattr(config, place) if place else config
        if source is not None:
            rendered[name] = key.write(getattr(source, attribute))
    if config.nope_layers:
        rendered["no_rope_layers"] = [int(index not in config.nope_layers) for index in range(config.num_hidden_layers)]
    elif family.model_type == "smollm3":
        rendered["no_rope_layers"] = [1] * config.num_hidden_layers
    return rendered | write_rope(config, family) | _write_windows(config, family)


def _family(raw: dict[str, Any]) -> Family:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise InvalidInput(f"{_NAME}: architectures is {shown(named)}; it must be a list of one name.")
    known = known_families()
    if not isinstance(named[0], str) or named[0] not in known:
        nearest = nearest_family(str(named[0])[:200])
        unread = sorted(set(raw) - _allowed(nearest) - set(_IGNORED) - {*_INERT, *nearest.inert})
        missing = f", which has no {', '.join(map(shown, unread[:8]))}" if unread else ""
        raise Unsupported(
            f"{_NAME}: architectures[0] is {shown(named[0])}; the nearest that this build has is "
            f"{nearest.architecture}{missing}. It has {', '.join(known)}."
        )
    family = known[named[0]]
    if raw.get("auto_map") is not None and not family.brings_code:
        raise Unsupported(f"{_NAME} has auto_map; code from a model folder is never run.")
    _check_quantization(raw.get("quantization_config"))
    if raw.get("model_type", family.model_type) != family.model_type:
        raise InvalidInput(
            f"{_NAME}: model_type is {shown(raw['model_type'])}; {family.architecture} needs {family.model_type!r}."
        )
    return family


def _check_quantization(given: Any) -> None:
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method not in QUANT_METHODS:
        raise Unsupported(
            f"{_NAME}: quantization_config.quant_method is {shown(method)}; this build reads "
            f"{', '.join(QUANT_METHODS)}."
        )
    if method == "fp8" and given.get("weight_block_size") not in (None, [128, 128]):
        raise Unsupported(
            f"{_NAME}: quantization_config.weight_block_size is {shown(given.get('weight_block_size'))}; this build "
            "reads [128, 128], or one scale for a tensor or an output."
        )
    if method == "compressed-tensors" and given.get("format") != "float-quantized":
        raise Unsupported(
            f"{_NAME}: quantization_config.format is {shown(given.get('format'))}; this build reads float-quantized."
        )


def _allowed(family: Family) -> set[str]:
    windows = set() if family.windows is None else set(_PATTERNS)
    derived = set() if family.derive is None else set(_DERIVED)
    return {*_STRUCTURE, *family.all_keys, *family.aliases, *family.rope_keys.values(), *windows, *derived}


def _checked_keys(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the keys that say something, with the family's defaults for those that the file leaves out."""
    allowed, inert = _allowed(family), _INERT | dict(family.inert)
    for key in inert.keys() - allowed | family.inert.keys():
        value, expected = raw.get(key), inert[key]
        if value is not None and (value != expected or isinstance(value, bool) != isinstance(expected, bool)):
            known = str(expected).lower() if isinstance(expected, bool) else repr(expected)
            raise Unsupported(f"{_NAME}: {key} is {shown(value)}; this build has {known}.")
    unknown = sorted(
        key for key, value in raw.items() if value is not None and key not in allowed | set(_IGNORED) | set(inert)
    )
    if unknown:
        named = ", ".join(map(shown, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
        raise InvalidInput(
            f"{_NAME} has unknown keys: {named}. Keys that are read: {', '.join(sorted(allowed))}. "
            f"Keys that are ignored: {', '.join(_IGNORED)}. Keys of one value: {', '.join(inert)}."
        )
    given = {key: value for key, value in raw.items() if key in allowed and key not in family.inert}
    for alias, key in family.aliases.items():
        if alias in given:
            given.setdefault(key, given.pop(alias))
    required = [
        name
        for name, key in family.all_keys.items()
        if {field.removeprefix("encoder.") for field in key.fields} & {*_REQUIRED_FIELDS, *_REQUIRED_OF_PARTS}
    ]
    missing = [key for key in required if key not in given and key not in family.defaults]
    if missing:
        raise InvalidInput(f"{_NAME} lacks {', '.join(missing)}.")
    for key, default in family.defaults.items():
        if callable(default) and given.get(key) is None:
            # Of a value that is no number nothing follows; what is wrong with it is said where it is checked.
            with contextlib.suppress(TypeError):
                given[key] = default(given)
        elif not callable(default):
            given.setdefault(key, default)
    _check_derived(given, family)
    return given


def _check_derived(given: dict[str, Any], family: Family) -> None:
    """Checks what functions of a family read before anything else looks at it; a null flag is its default."""
    for name, default in family.defaults.items():
        if isinstance(default, bool) and name not in _WINDOW_KEYS:
            given[name] = default if given[name] is None else given[name]
            if not isinstance(given[name], bool):
                raise InvalidInput(f"{_NAME}: {name} is {shown(given[name])}; it must be true or false.")
    for name in ("decoder_sparse_step", "no_rope_layer_interval"):
        if given.get(name) is not None:
            check_int(f"{_NAME}: {name}", given[name], 1, SIZE_LIMITS["num_hidden_layers"])
    for name in ("mlp_only_layers", "no_rope_layers"):
        layers = given.get(name)
        if layers is not None and not (isinstance(layers, list) and all(isinstance(each, int) for each in layers)):
            raise InvalidInput(f"{_NAME}: {name} is {shown(layers)}; it must be a list of whole numbers, or null.")


def _popped(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    own = [name for name in options if name.startswith(prefix)]
    return {name.removeprefix(prefix): options.pop(name) for name in own}


def _encoder(options: Mapping[str, Any], own: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a decoder's encoder: the same but for its own keys and what is about logits."""
    shared = {name: value for name, value in options.items() if name not in _OF_LOGITS}
    try:
        return ModelConfig(**{**shared, **own, "is_encoder": True})
    except (InvalidInput, Unsupported) as error:
        raise type(error)(f"of the encoder, {error}") from None


def _derived_head_dim(options: Mapping[str, Any]) -> int:
    hidden_size, num_heads = options["hidden_size"], options["num_attention_heads"]
    if hidden_size % num_heads:
        raise InvalidInput(
            f"{_NAME}: hidden_size is {hidden_size}, not a multiple of num_attention_heads ({num_heads}); "
            "give head_dim explicitly."
        )
    return hidden_size // num_heads


def _windows(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the window of all layers, or of each, from what the file says and the family's pattern."""
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    count = raw[next(name for name, key in family.all_keys.items() if key.field == "num_hidden_layers")]
    is_used = raw.get("use_sliding_window", True)
    if not isinstance(is_used, bool):
        raise InvalidInput(f"use_sliding_window is {shown(is_used)}; it must be true or false.")
    if types is not None and (
        not isinstance(types, list)
        or len(types) != count
        or any(kind not in ("sliding_attention", "full_attention", *family.layer_types) for kind in types)
    ):
        raise InvalidInput(
            f"layer_types is {shown(types)}; it must have 'full_attention' or 'sliding_attention' for each of the "
            f"{count} layers."
        )
    if family.windows is None:
        asked = {
            "sliding_window": window is not None and raw.get("use_sliding_window") is not False,
            "use_sliding_window": raw.get("use_sliding_window") is True,
            "layer_types": "sliding_attention" in (types or ()),
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise Unsupported(f"{name} is {shown(raw[name])}; {family.architecture} has no windows.")
        return {}
    if window is None or not is_used:
        return {}
    if types is not None and family.windows != "all":
        slides = [kind == "sliding_attention" for kind in types]
    else:
        slides = [family.windows == "all" or family.windows(layer, raw) for layer in range(count)]  # type: ignore[operator]
    if all(slides):
        return {"sliding_window": window}
    return {"layer_windows": tuple(window if slide else None for slide in slides)} if any(slides) else {}


def _write_windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    windows = [config.window_of(layer) for layer in range(config.num_hidden_layers)]
    window = next((window for window in windows if window is not None), None)
    if family.windows is None:
        return {}
    written: dict[str, Any] = {"sliding_window": window}
    if "use_sliding_window" in family.defaults:
        written["use_sliding_window"] = window is not None
    if family.windows != "all":
        written["layer_types"] = ["full_attention" if each is None else "sliding_attention" for each in windows]
    return written


def _stored_dtype(raw: Mapping[str, Any]) -> str:
    given = {key: raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise InvalidInput(f"torch_dtype and dtype differ ({shown(given)}).")
    name = next(iter(given.values()), "float32")
    if not isinstance(name, str) or name not in QUERY_DTYPES:
        raise Unsupported(f"{next(iter(given))} is {shown(name)}; it must be one of {', '.join(QUERY_DTYPES)}.")
    return name
