"""generation_config.json: the sampling parameters that a model's authors recommend, and its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jattn.llm.load.folder import member, read_object
from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, check_fields

_NAME = "generation_config.json"
_OF_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_tokens")
#: The file's names that differ.
_FILE_NAMES = {"max_tokens": "max_new_tokens"}
_OF_ENCODERS = ("decoder_start_token_id", "forced_bos_token_id")
# Settings that would change a text and are not supported, with the value that turns them off.
_OFF_AT_NONE = """
bad_words_ids begin_suppress_tokens constraints dola_layers exponential_decay_length_penalty force_words_ids
sequence_bias stop_strings suppress_tokens top_h watermarking_config
"""
_OFF_AT_0 = """
diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length min_new_tokens
no_repeat_ngram_size penalty_alpha
"""
_OFF_AT_1 = "encoder_repetition_penalty guidance_scale num_beams typical_p"
_UNSERVED: dict[str, Any] = {
    name: off for names, off in ((_OFF_AT_NONE, None), (_OFF_AT_0, 0), (_OFF_AT_1, 1)) for name in names.split()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The settings of generation_config.json; None if the file has no value. Names are those of `SamplingParams`.

    Attributes:
        temperature: temperature; 0 if the file turns sampling off.
        top_k: number of the likeliest tokens to keep; 0 keeps all.
        top_p: keep the likeliest tokens up to this probability.
        min_p: keep the tokens of at least this share of the likeliest one's probability.
        repetition_penalty: penalty of the logits of earlier tokens.
        max_tokens: most new tokens.
        bos_token_id: the token that starts a document.
        eos_token_ids: the tokens that end a generation.
        decoder_start_token_id: the token that a decoder with an encoder starts with.
        forced_bos_token_id: the one that always follows it.
        forced_eos_token_id: the last one of a text that is as long as it may be; of a list of one its element.
        unserved: keys of the file that would change a text and are not honoured.

    Raises:
        InvalidInput: a value out of range.
    """

    temperature: Annotated[float | None, Limits(0.0, 1e3)] = None
    top_k: Annotated[int | None, Limits(0, INT32_MAX, also="")] = None
    top_p: Annotated[float | None, Limits(1e-9, 1.0)] = None
    min_p: Annotated[float | None, Limits(0.0, 1.0)] = None
    repetition_penalty: Annotated[float | None, Limits(1e-9, 1e3)] = None
    max_tokens: Annotated[int | None, Limits(1, INT32_MAX, also="")] = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    unserved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings, by keyword of `SamplingParams`."""
        named = {name: getattr(self, name) for name in _OF_SAMPLING}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def in_file(self) -> dict[str, Any]:
        """The sampling settings, by key of generation_config.json."""
        settings = {_FILE_NAMES.get(name, name): value for name, value in self.sampling.items()}
        return settings | ({"do_sample": self.temperature != 0} if settings else {})


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """Reads generation_config.json of a checked model folder; see `load_generation_defaults`."""
    if member(path, _NAME) is None:
        return GenerationDefaults()
    raw = read_object(path, _NAME)
    values: dict[str, Any] = {"temperature": 0.0} if raw.get("do_sample") is False else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "bos_token_id", *_OF_ENCODERS)
    values = {name: raw.get(name) for name in names} | {"max_tokens": raw.get("max_new_tokens")} | values
    values["forced_eos_token_id"], is_served = forced_token(raw.get("forced_eos_token_id"))
    unserved = [name for name, none in sorted(_UNSERVED.items()) if raw.get(name) not in (None, none, [], {})]
    values["unserved"] = (*unserved, *([] if is_served else ["forced_eos_token_id"]))
    try:
        if raw.get("eos_token_id") is not None:
            values["eos_token_ids"] = token_ids(raw["eos_token_id"], "eos_token_id")
        return GenerationDefaults(**values)
    except InvalidInput as error:
        raise error.under(_NAME) from None


def forced_token(value: Any) -> tuple[Any, bool]:
    """Returns the token that a value or a list of one value forces, and whether this is all that the file asks for.

    Between several transformers chooses without looking at the model; here none is forced then.
    """
    if not isinstance(value, list):
        return value, True
    return value[0] if len(value) == 1 else None, len(value) < 2


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Returns an id, a list of ids or null as a tuple; ranges are ModelConfig's to check."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if len(values) > 64 or any(isinstance(token, bool) or not isinstance(token, int) for token in values):
        raise InvalidInput(name, value=value, wanted="it must be a token id, a list of at most 64, or null")
    return tuple(values)
