"""Sampling parameters: vLLM's names, defaults and limits; each value is checked at construction."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import numpy as np

from torch_core.base.checks import INT32_MAX, check_bool, check_int, shown
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits, check_fields

#: The first columns of packed parameters, float32; top_k, the seed and num_prompt_tokens follow.
PACKED_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
PACKED_SEED = len(PACKED_FLOATS) + 1

_MAX_STOP_STRINGS = 16
#: The largest float32: logits are divided by the temperature on the device.
_MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")
_MAX_CHOICES = 1024
_MAX_BAD_WORDS = 64
#: In UTF-8.
MAX_BAD_WORD_BYTES = 1024
_MAX_GRAMMAR_CHARACTERS = 1 << 17


class LIMITS:
    """Entries of one request's tables on the device; the same for all, so that no program depends on them."""

    stop_tokens = 128
    logit_bias = 512


class RequestOutputKind(enum.Enum):
    """The outputs of `AsyncLLM.generate`: all text so far, the new text, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The required format of the text: exactly one of these fields (vLLM's names). Needs the extra `structured`
    (llguidance).

    Attributes:
        json: a JSON schema, as a mapping or as its text.
        regex: a regular expression that the whole text matches.
        choice: strings, one of which is the text.
        grammar: a grammar in llguidance's dialect of Lark.
        json_object: any JSON object.
        disable_any_whitespace: no space and no line break between the parts of JSON.

    Raises:
        InvalidInput: none of them or several, or a value of the wrong type.

    Example:
        >>> StructuredOutputsParams(choice=["yes", "no"]).choice
        ('yes', 'no')
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        if self.json_object is not None:
            check_bool("json_object", self.json_object)
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice, _MAX_CHOICES))
            if not self.choice:
                raise InvalidInput("choice", "is empty", "give at least one string")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidInput(name, value=getattr(self, name), wanted="it must be text")
        if not isinstance(self.json, str | Mapping | None):
            raise InvalidInput("json", value=self.json, wanted="it must be a schema as a mapping or as text")
        texts = {
            "json": None if self.json is None else self.schema(),
            "regex": self.regex,
            "choice": None if self.choice is None else "".join(self.choice),
            "grammar": self.grammar,
        }
        for name, text in texts.items():
            if text is not None and len(text) > _MAX_GRAMMAR_CHARACTERS:
                wanted = f"it must have {_MAX_GRAMMAR_CHARACTERS} at most"
                raise InvalidInput(name, f"has {len(text)} characters", wanted)
        given = self.constraints()
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            wanted = "give one of json, regex, choice, grammar, json_object"
            raise InvalidInput("structured_outputs", f"has {what}", wanted)

    def constraints(self) -> dict[str, Any]:
        """Returns the given field, by name."""
        fields = {name: getattr(self, name) for name in ("json", "regex", "choice", "grammar", "json_object")}
        return {name: value for name, value in fields.items() if value is not None and value is not False}

    def schema(self) -> str:
        """Returns the JSON schema as text.

        Raises:
            InvalidInput: it has values outside JSON, or is nested too deep.
        """
        if isinstance(self.json, str):
            return self.json
        try:
            return json.dumps(self.json, default=_as_object)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput("json", f"is no schema that JSON can spell: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; names, defaults and order of application are vLLM's.

    Attributes:
        n: number of samples of the prompt; they share its blocks.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: after top_k, keep the likeliest tokens whose probabilities reach this sum; 1 keeps all.
        min_p: before top_k, keep the tokens with at least this share of the likeliest token's probability; 0 keeps all.
        repetition_penalty: divisor of positive logits, and factor of negative ones, of tokens in prompt and output.
        presence_penalty: subtracted from the logits of tokens in the output, -2 to 2.
        frequency_penalty: the same, times the token's count in the output.
        seed: seed of this request's random numbers; None derives one from the engine's seed and the request's number.
            The samples of one prompt use consecutive seeds.
        max_tokens: most tokens to generate; None for as many as the model's length allows.
        min_tokens: number of tokens before which only max_tokens ends the text.
        stop: string or strings that end the text, which is cut before the first of them. Stored as a tuple.
        stop_token_ids: tokens that end the text, in addition to the model's end-of-sequence tokens. Stored as a tuple.
        include_stop_str_in_output: cut after the stop string instead.
        include_eos_token: keep the end-of-sequence token, or token of stop_token_ids, that ended the output in its
            `token_ids` and log-probabilities.
        ignore_eos: do not stop at the model's end-of-sequence tokens, unless a grammar allows no other token.
        logprobs: return the log-probabilities of this many of the likeliest tokens and of the sampled one; None for
            none, at most the engine's `max_logprobs`. -1 for the whole vocabulary, if `max_logprobs` allows it. By
            default they are those of the model's logits before any option here is applied; see
            `EngineConfig.logprobs_mode`. 0, the sampled token's alone, costs least.
        prompt_logprobs: the same for the tokens of the prompt; -1 for the whole vocabulary.
        return_sampling_mask: return the tokens that could be sampled at each position, after all filters here, as
            `CompletionOutput.sampling_mask`; the engine needs `EngineConfig(enable_return_sampling_mask=True)`. None
            returns them there if top_k bounds their number.
        return_routed_experts: return `CompletionOutput.routed_experts`; None for what the engine's
            `EngineConfig.enable_return_routed_experts` says.
        logit_bias: mapping from token id to a number that is added to its logit.
        allowed_token_ids: the only tokens that may be sampled. Stored as a tuple.
        bad_words: texts that the output's text does not contain, whatever tokens they would come by; also not within a
            word, or after a space. White space at their beginning does not count (vLLM), upper and lower case do. A
            token that would complete one is not sampled. If that leaves none, the request ends with the reason
            "error". Stored as a tuple.
        structured_outputs: required format of the text.
        logits_processors: mapping from the name of one of the engine's processors to the number it is called with.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: return text; if False, there are only token ids, and no stop strings.
        truncate_prompt_tokens: keep this many of the prompt's last tokens; -1 for as many as leave room for one new
            token.
        output_kind: the outputs that `AsyncLLM.generate` yields.

    Raises:
        InvalidInput: a value out of range; the message names it.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=4, stop="end").stop
        ('end',)
    """

    n: Annotated[int, Limits(1, 1024)] = 1
    temperature: Annotated[float, Limits(0, _MAX_FLOAT32, wanted="a finite float32 of at least 0")] = 1.0
    top_k: Annotated[int, Limits(-1, 1 << 20, also=" (0 or -1 for all)")] = 0
    top_p: Annotated[float, Limits(above=0, high=1, wanted="above 0 and at most 1")] = 1.0
    min_p: Annotated[float, Limits(0, 1, wanted="from 0 to 1")] = 0.0
    repetition_penalty: Annotated[float, Limits(above=0, high=_MAX_FLOAT32, wanted="a finite float32 above 0")] = 1.0
    presence_penalty: Annotated[float, Limits(-2, 2, wanted="from -2 to 2")] = 0.0
    frequency_penalty: Annotated[float, Limits(-2, 2, wanted="from -2 to 2")] = 0.0
    seed: Annotated[int | None, Limits(0, (1 << 32) - 1)] = None
    max_tokens: Annotated[int | None, Limits(1, INT32_MAX, also="")] = 16
    min_tokens: Annotated[int, Limits(0, INT32_MAX)] = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    include_eos_token: bool = True
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Limits(-1, INT32_MAX)] = None
    prompt_logprobs: Annotated[int | None, Limits(-1, INT32_MAX)] = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: Annotated[StructuredOutputsParams | None, Limits(wanted="StructuredOutputsParams, or None")] = (
        None
    )
    logits_processors: Mapping[str, float] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: Annotated[int | None, Limits(-1, INT32_MAX)] = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in PACKED_FLOATS:
            object.__setattr__(self, name, _as_float(name, getattr(self, name)))
        self._convert_collections()
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            wanted = f"it must not be above max_tokens ({self.max_tokens})"
            raise InvalidInput("min_tokens", value=self.min_tokens, wanted=wanted)
        if self.truncate_prompt_tokens == 0:
            raise InvalidInput("truncate_prompt_tokens", value=0, wanted="it must be -1, at least 1, or None")
        if self.stop and not self.detokenize:
            raise InvalidInput("stop", "is given and detokenize is False", "stop strings are found in the text")

    def _convert_collections(self) -> None:
        """Stores each collection as a tuple or a dict, and checks its elements."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        converted = {
            "stop": _strings("stop", stop, _MAX_STOP_STRINGS),
            "bad_words": _bad_words(self.bad_words),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": _numbers("logit_bias", self.logit_bias),
            "logits_processors": _numbers("logits_processors", self.logits_processors),
        }
        if self.allowed_token_ids is not None:
            converted["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not converted["allowed_token_ids"]:
                raise InvalidInput("allowed_token_ids", "is empty", "name at least one token, or pass None for all")
        for token in converted["logit_bias"] or ():
            check_int("a token of logit_bias", token, 0, INT32_MAX)
        for name, most in (("stop_token_ids", LIMITS.stop_tokens), ("logit_bias", LIMITS.logit_bias)):
            if len(converted[name] or ()) > most:
                raise InvalidInput(name, f"has {len(converted[name])} entries", f"it must have {most} at most")
        for name, value in converted.items():
            object.__setattr__(self, name, value)


def cuts_prompt(params: Any) -> bool:
    """Returns whether a request's parameters cut a prompt that is too long; False for what are no parameters."""
    return getattr(params, "truncate_prompt_tokens", None) is not None


def pack_sampling(params: SamplingParams, seed: int, num_prompt_tokens: int) -> np.ndarray:
    """Returns a request's parameters as int32[9], floats by their bits; `Rows.unpack` reads them on the device."""
    count = len(PACKED_FLOATS)
    row = np.zeros(count + 3, np.int32)
    row[:count].view(np.float32)[:] = _packed_floats(params)
    row[count] = params.top_k
    row[PACKED_SEED:].view(np.uint32)[:] = seed, num_prompt_tokens
    return row


_packed_floats = attrgetter(*PACKED_FLOATS)


class SamplingKind(enum.IntEnum):
    """The part of the sampler that a batch needs; static, so that batches without filters do not pay for them.

    A greedy batch draws no noise, a plain one for every token of the vocabulary. A scored one also has the
    log-probabilities of the sampled tokens, and a full one does all there is. Each serves the rows of those before it.
    """

    GREEDY = 0
    PLAIN = 1
    SCORED = 2
    FULL = 3

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.name.lower()


def sampling_kind(params: SamplingParams) -> SamplingKind:
    """Returns the smallest kind of step that serves a row."""
    filters = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    if (
        filters
        or needs_slot(params)
        or params.return_sampling_mask
        or params.structured_outputs is not None
        or bool(params.bad_words)
        or params.logprobs
        or params.prompt_logprobs is not None
    ):
        return SamplingKind.FULL
    if params.logprobs == 0:
        return SamplingKind.SCORED
    return SamplingKind.PLAIN if params.temperature > 0 else SamplingKind.GREEDY


def needs_slot(params: SamplingParams) -> bool:
    """Returns whether a row needs tables or its earlier tokens on the device."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.min_tokens or params.logit_bias or params.logits_processors)
        or params.allowed_token_ids is not None
    )


def _as_object(value: object) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} is none of its values")
    return dict(value)


def _as_float(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidInput(name, value=value, wanted="it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInput(name, value=value, wanted="it must be a number that fits a float") from None


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    try:
        if isinstance(values, (str, bytes, Mapping)):
            # They would pass as sequences of their elements.
            raise TypeError
        return tuple(values)
    except TypeError:
        raise InvalidInput(name, value=values, wanted="it must be a sequence") from None


def _strings(name: str, values: Any, most: int) -> tuple[str, ...]:
    if isinstance(values, str):
        raise InvalidInput(name, "is a string", "pass a tuple of strings")
    strings = _as_tuple(name, values)
    if len(strings) > most or not all(isinstance(text, str) and text for text in strings):
        raise InvalidInput(name, f"must hold at most {most} strings, none of them empty")
    return strings


def _bad_words(values: Any) -> tuple[str, ...]:
    words = _strings("bad_words", values, _MAX_BAD_WORDS)
    for word in words:
        try:
            size = len(word.encode())
        except UnicodeEncodeError:
            raise InvalidInput("bad_words", f"has {shown(word)}", "UTF-8 has no lone surrogates") from None
        if size > MAX_BAD_WORD_BYTES:
            wanted = f"a text must have {MAX_BAD_WORD_BYTES} at most"
            raise InvalidInput("bad_words", f"has a text of {size} bytes", wanted)
    return words


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    tokens = _as_tuple(name, values)
    for index, token in enumerate(tokens):
        check_int(f"{name}[{index}]", token, 0, INT32_MAX)
    return tokens


def _numbers(name: str, values: Any) -> dict[Any, float] | None:
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise InvalidInput(name, value=values, wanted="it must be a mapping, or None")
    numbers = {key: _as_float(f"{name}[{shown(key)}]", value) for key, value in values.items()}
    for key, value in numbers.items():
        if not (math.isfinite(value) and abs(value) <= _MAX_FLOAT32):
            raise InvalidInput(f"{name}[{shown(key)}]", value=value, wanted="it must be a finite float32")
    return numbers
