"""The keys of config.json: the allowed, required and refused keys of a family's file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.llm.load.families import Family, known_families
from jattn.llm.load.packing import read_packing
from jattn.llm.load.rope import ROPE_NAMES
from jattn.llm.models.config_fields import PARTS, SIZE_LIMITS
from torch_core.base.checks import check_int, shown
from torch_core.base.errors import InvalidInput, Unsupported

FILE = "config.json"
#: Fields that every file sets, under any key.
REQUIRED_FIELDS = tuple(name for name in SIZE_LIMITS if name not in ("num_key_value_heads", "head_dim"))
#: The required fields of the optional parts of a family.
_REQUIRED_OF_PARTS = tuple(
    f"{part}.{field.name}"
    for part, kind in PARTS.items()
    for field in dataclasses.fields(kind)
    if field.default is dataclasses.MISSING
)
#: How weights may be quantised; they are read as numbers of the model's dtype.
QUANT_METHODS = ("fp8", "mxfp4", "compressed-tensors", "awq", "gptq")
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
    "forced_eos_token_id",
    "quantization_config",
)
#: Keys of Hugging Face's and other writers that never change the results of inference.
_IGNORED = """
activation_dropout add_bias_logits attention_dropout attention_probs_dropout_prob attention_softmax_in_fp32
attn_implementation attn_pdrop auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens bias_dropout_fusion
cache_implementation chunk_size_feed_forward classif_dropout classifier_dropout cross_attention_hidden_size
custom_pipelines decoder_layerdrop dense_act_fn diversity_penalty do_sample dropout dropout_rate early_stopping
embd_pdrop embedding_dropout encoder_layerdrop encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty
extra_pos_embeddings finetuning_task force_bos_token_to_be_generated forced_bos_token_id gradient_checkpointing
hidden_dropout hidden_dropout_prob id2label init_std initial_context_length initializer_factor initializer_range
is_decoder is_gated_act is_llama_config label2id length_penalty masked_softmax_fusion max_length max_sequence_length
max_window_layers min_length model_max_length n_ctx no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers
num_nextn_predict_layers num_return_sequences offset_alibi output_attentions output_hidden_states output_past
output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type qk_head_dim remove_invalid_values
reorder_and_upcast_attn repetition_penalty resid_pdrop residual_dropout return_dict return_dict_in_generate
router_aux_loss_coef router_jitter_noise sep_token_id seq_aux seq_length skip_bias_add skip_bias_add_qkv slow_but_exact
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript transformers.js_config
transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
IGNORED = tuple(_IGNORED.split())
#: Keys of a composite model that apply to its language model.
_OF_WHOLE = ("bos_token_id", "eos_token_id", "torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
#: Keys that the functions of a family read.
_DERIVED = ("decoder_sparse_step", "mlp_layer_types", "no_rope_layers", "no_rope_layer_interval")
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
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


def family_of_file(raw: dict[str, Any]) -> Family:
    """Returns the family that a file names; refuses others, and code."""
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise InvalidInput("architectures", value=named, wanted="it must be a list of one name").under(FILE)
    known = known_families()
    # Of several with one architecture, the one of its language model; the first one if the file does not say.
    text = raw.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    parts = [family for family in reversed([*known.values()]) if family.whole is not None]
    parts.sort(key=lambda family: family.model_type == kind)
    wholes = {family.whole.architecture: family for family in parts if family.whole is not None}
    also = wholes | {name: family for family in known.values() for name in family.also}
    if not isinstance(named[0], str) or named[0] not in known | also:
        # No other family is named: equal keys do not say that two architectures compute the same.
        wanted = (
            "this build has those of jattn.llm.load.known_families(), and jattn.llm.load.register_family adds another"
        )
        raise Unsupported("architectures[0]", value=named[0], wanted=wanted).under(FILE)
    family = (also | known)[named[0]]
    if raw.get("auto_map") is not None and not family.brings_code:
        raise Unsupported(FILE, "has auto_map", "code from a model folder is never run")
    model_type = family.model_type if family.whole is None or named[0] not in wholes else family.whole.model_type
    if raw.get("model_type", model_type) not in (model_type, *family.also_types):
        raise InvalidInput("model_type", value=raw["model_type"], wanted=f"{named[0]} needs {model_type!r}").under(FILE)
    return family


def is_whole(raw: dict[str, Any], family: Family) -> bool:
    """Returns whether the file is of an architecture that has a model of the family."""
    return family.whole is not None and raw.get("architectures") == [family.whole.architecture]


def language_part(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the content of the family's own file: the text_config of a composite model, or the whole file."""
    if family.whole is None or not is_whole(raw, family):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise InvalidInput("text_config", value=text, wanted=f"{family.whole.architecture} needs an object").under(FILE)
    if text.get("model_type", family.model_type) != family.model_type:
        wanted = f"this build reads the language model of {family.whole.architecture} where it is {family.model_type!r}"
        raise InvalidInput("text_config.model_type", value=text["model_type"], wanted=wanted).under(FILE)
    common = {key: raw[key] for key in _OF_WHOLE if raw.get(key) is not None}
    return {**family.whole.defaults, **text, **common, "architectures": [family.architecture]}


def checked_keys(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the keys that say something, with the family's defaults for those that the file leaves out."""
    if family.respelled is not None:
        try:
            raw = dict(family.respelled(raw))
        except (InvalidInput, Unsupported) as error:
            raise error.under(FILE) from None
    _check_quantization(raw.get("quantization_config"))
    allowed, inert = _allowed(family), _INERT | dict(family.inert)
    for key in inert.keys() - allowed | family.inert.keys():
        value, expected = raw.get(key), inert[key]
        if value is not None and (value != expected or isinstance(value, bool) != isinstance(expected, bool)):
            known = str(expected).lower() if isinstance(expected, bool) else repr(expected)
            raise Unsupported(key, value=value, wanted=f"this build has {known}").under(FILE)
    known = {*allowed, *IGNORED, *family.ignored, *inert}
    # Keys that begin with an underscore are the writer's own notes.
    unknown = [key for key, value in raw.items() if value is not None and key not in known and not key.startswith("_")]
    if unknown:
        key, more = shown(min(unknown)), f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        wanted = f"hf_overrides={{{key}: None}} loads without it, if the model is the same without"
        raise InvalidInput(FILE, f"has the unknown key {key}{more}", wanted)
    given = {key: value for key, value in raw.items() if key in allowed and key not in family.inert}
    for alias, key in family.aliases.items():
        value = given.pop(alias, None)
        if value is not None and given.get(key) not in (None, value):
            raise InvalidInput(alias, value=value, wanted=f"{key} is {shown(given[key])}. Leave one out").under(FILE)
        if value is not None:
            given[key] = value
    required = [
        name
        for name, key in family.all_keys.items()
        if {field.removeprefix("encoder.") for field in key.fields} & {*REQUIRED_FIELDS, *_REQUIRED_OF_PARTS}
    ]
    missing = [key for key in required if key not in given and key not in family.all_defaults]
    if missing:
        raise InvalidInput(FILE, f"lacks {', '.join(missing)}")
    _check_layer_count(given, family)
    for key, default in family.all_defaults.items():
        if callable(default) and given.get(key) is None:
            # A value that is not a number is ignored here; its check raises the error.
            with contextlib.suppress(TypeError, ArithmeticError, LookupError):
                given[key] = default(given)
        elif not callable(default):
            given.setdefault(key, default)
    try:
        _check_derived(given, family)
    except InvalidInput as error:
        raise error.under(FILE) from None
    return given


def _check_layer_count(given: Mapping[str, Any], family: Family) -> None:
    """Refuses a number of layers before a default has an entry for each."""
    for name, key in family.all_keys.items():
        if "num_hidden_layers" in key.fields and given.get(name) is not None:
            try:
                check_int(name, given[name], 1, SIZE_LIMITS["num_hidden_layers"])
            except InvalidInput as error:
                raise error.under(FILE) from None


def _check_quantization(given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise InvalidInput("quantization_config", value=given, wanted="it must be an object").under(FILE)
    method = given.get("quant_method")
    name, served, wanted = "quant_method", QUANT_METHODS, f"this build reads {', '.join(QUANT_METHODS)}"
    if method == "fp8":
        name, served = "weight_block_size", (None, [128, 128])
        wanted = "this build reads [128, 128], or one scale for a tensor or an output"
    elif method == "compressed-tensors":
        name, served = "format", ("float-quantized", "pack-quantized")
        wanted = f"this build reads {', '.join(served)}"
    try:
        if given.get(name) not in served:
            raise Unsupported(name, value=given.get(name), wanted=wanted)
        read_packing(given)
    except (InvalidInput, Unsupported) as error:
        raise error.renamed(f"quantization_config.{error.root}").under(FILE) from None


def _allowed(family: Family) -> set[str]:
    windows = set() if family.windows is None else set(_PATTERNS)
    derived = {*family.derived} if family.derive is None else {*family.derived, *_DERIVED}
    return {*_STRUCTURE, *family.all_keys, *family.aliases, *family.rope_keys.values(), *windows, *derived}


def _check_derived(given: dict[str, Any], family: Family) -> None:
    """Checks the keys that functions of a family read, before they read them; a null flag is its default."""
    for name, default in family.all_defaults.items():
        if isinstance(default, bool) and name not in _WINDOW_KEYS:
            given[name] = default if given[name] is None else given[name]
            if not isinstance(given[name], bool):
                raise InvalidInput(name, value=given[name], wanted="it must be true or false")
    for name in ("decoder_sparse_step", "no_rope_layer_interval"):
        if given.get(name) is not None:
            check_int(name, given[name], 1, SIZE_LIMITS["num_hidden_layers"])
    for name in ("mlp_only_layers", "no_rope_layers"):
        layers = given.get(name)
        if layers is not None and not (isinstance(layers, list) and all(isinstance(each, int) for each in layers)):
            raise InvalidInput(name, value=layers, wanted="it must be a list of whole numbers, or null")
