"""The bodies of requests, field by field, with their types and limits; an error names the field."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, TypeVar

from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Choices, Limits, check_fields

_log = logging.getLogger("jattn.llm.serve")

#: Fields that have SamplingParams' names and meaning, which checks them.
_SAMPLING = frozenset({
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "logits_processors"),
})  # fmt: skip
_ANY = None
#: Fields of other servers that clients send: the values that ask for nothing, which are accepted, or `_ANY` for a field
#: that changes no answer of this server, which is accepted and logged once. Any other value is refused. An endpoint
#: that has the field itself reads it instead.
UNUSED: dict[str, tuple[Any, ...] | None] = {
    # For the client's own books, or for the operator of the server.
    **dict.fromkeys(("user", "safety_identifier", "metadata", "store", "request_id"), _ANY),
    # Price, speed and caches.
    **dict.fromkeys(("service_tier", "prediction"), _ANY),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _ANY),
    # For models that were trained on them.
    **dict.fromkeys(("verbosity", "reasoning_effort"), _ANY),
    # Older and other ways to ask for tools, documents, sounds and searches.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "modalities": (["text"],),
    # Searches other than sampling.
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "best_of": (1,),
    # Other forms of a prompt and of an answer.
    "echo": (False,),
    "suffix": ("",),
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_token_strs"), (False,)),
    **dict.fromkeys(("mm_processor_kwargs", "kv_transfer_params"), ({},)),
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_FORMATS = ("text", "json_object", "json_schema")
_B = TypeVar("_B", bound="Body")
#: OpenAI's limit.
_MAX_INPUTS = 2048


def _is_tokens(value: Any) -> bool:
    """Returns whether a value is a list of whole numbers that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_prompt(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    several = is_list and all(isinstance(each, str) or _is_tokens(each) for each in value)
    return isinstance(value, str) or several or _is_tokens(value)


def text_of(name: str, item: Mapping[str, Any], key: str) -> str:
    """Returns a field of an object within a body; raises InvalidInput if it is no text."""
    if not isinstance(item.get(key), str):
        raise InvalidInput(f"{name}.{key}", value=item.get(key), wanted="it must be a string")
    return item[key]


def _check_texts(name: str, value: Any) -> None:
    if not _is_prompt(value):
        raise InvalidInput(name, value=value, wanted="it must be a string, token ids, or a list of either")


def _check_strings(name: str, value: Any) -> None:
    listed = value if isinstance(value, list) and value else [value]
    if value is not None and not all(isinstance(each, str) for each in listed):
        raise InvalidInput(name, value=value, wanted="it must be a string or a list of strings")


def _is_stream_options(value: Any) -> bool:
    # Obfuscation pads the events and changes no text.
    known = value.keys() <= {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    return known and set(map(type, value.values())) <= {bool}


def _check_tool_choice(name: str, value: Any) -> None:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if value not in (None, "none", "auto", "required") and not is_named:
        raise InvalidInput(name, value=value, wanted="it must be none, auto, required, or the function to call")


#: Types of fields, with the words of errors.
Flag = Annotated[bool, Limits(wanted="true or false")]
Whole = Annotated[int, Limits(wanted="a whole number")]
Text = Annotated[str, Limits(wanted="a string")]
List = Annotated[list[Any], Limits(wanted="a list")]
Object = Annotated[dict[str, Any], Limits(wanted="an object")]
#: Conditions of fields in addition to their type, with the text of the error.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (
        lambda given: not given or (_is_tokens(given) and all(each >= 0 for each in given)),
        "it must be a list of token ids",
    ),
    "cache_salt": (lambda given: 0 < len(given) <= 64, "it must be 1 to 64 characters"),
    "response_format": (lambda given: given.get("type") in _FORMATS, f"its type must be one of {', '.join(_FORMATS)}"),
    "stream_options": (_is_stream_options, "it must be an object with include_usage, true or false"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The fields of every body; a field that is null counts as missing."""

    model: Text | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _RULES.keys() & self.__dataclass_fields__:
            (fits, wanted), value = _RULES[name], getattr(self, name)
            if value is not None and not fits(value):
                raise InvalidInput(name, value=value, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLoraBody(Body):
    """The fields of `/v1/load_lora_adapter`, vLLM's: the name of an adapter and its folder on the server."""

    lora_name: Text | None = None
    lora_path: Text | None = None
    load_inplace: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadLoraBody(Body):
    """The fields of `/v1/unload_lora_adapter`, vLLM's."""

    lora_name: Text | None = None
    lora_int_id: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBody(Body):
    """The fields of completions and of chats; `sampling` has those of SamplingParams by name, unchanged.

    `stream_options` `{"include_usage": true}` ends a stream with the counts of tokens, and with
    `"continuous_usage_stats": true` (vLLM's) each event has those of its choice. Only requests with equal
    `cache_salt` share cached prefixes. A lower `priority` runs first. `vllm_xargs` are the inputs that each request
    brings for the model; see `Engine.add`.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: Whole | None = None
    seed: Whole | None = None
    logit_bias: Object | None = None
    structured_outputs: Object | None = None
    response_format: Object | None = None
    stream: Flag = False
    stream_options: Object | None = None
    cache_salt: Text | None = None
    priority: Whole = 0
    vllm_xargs: Object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(GenerationBody):
    """The body of `/v1/completions`: of `best_of` samples the best `n` are returned, after the prompt with `echo`."""

    prompt: Annotated[Any, _check_texts]
    max_tokens: Whole | None = 16
    logprobs: Whole | None = None
    best_of: Whole | None = None
    echo: Flag = False
    return_token_ids: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`: `max_completion_tokens` is the newer name of `max_tokens`.

    `reasoning_effort` is a variable of the template, as in vLLM. Without `include_reasoning` an answer leaves its
    reasoning out.
    """

    messages: List
    max_completion_tokens: Whole | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int | None, Limits(0, 20, also="")] = None
    tools: List | None = None
    tool_choice: Annotated[Any, _check_tool_choice] = None
    parallel_tool_calls: Flag = True
    include_reasoning: Flag = True
    reasoning_effort: Annotated[str | None, Choices(*_EFFORTS)] = None
    chat_template: Text | None = None
    chat_template_kwargs: Object = field(default_factory=dict)
    add_generation_prompt: Flag = True
    return_token_ids: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeBody(Body):
    """The body of `/tokenize` with a prompt."""

    prompt: Text
    add_special_tokens: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    tokens: List


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsBody(Body):
    """The fields of embeddings and of scores; see `LLM.embed` and `LLM.score`."""

    pooling: Annotated[str | None, Choices(None, "mean", "cls", "last")] = None
    truncate_prompt_tokens: Annotated[int | None, Limits(-1, also="")] = None

    #: The field that holds the texts.
    texts_field: ClassVar[str]

    @property
    def num_texts(self) -> int:
        """Number of texts, or of pairs."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsBody(VectorsBody):
    """The body of `/v1/embeddings`; "base64" is for bytes of float32, little-endian.

    `dimensions` are the first elements of a vector, whose length becomes 1 again with `normalize`.
    """

    input: Annotated[Any, _check_texts]
    encoding_format: Annotated[str, Choices("float", "base64")] = "float"
    normalize: Flag = True
    dimensions: Annotated[int | None, Limits(1, also="")] = None
    prompt_name: Text | None = None

    texts_field = "input"

    @property
    def prompts(self) -> list[Any]:
        """The prompts, one or several."""
        return prompts_of("input", self.input, _MAX_INPUTS)

    @property
    def num_texts(self) -> int:
        """Number of prompts."""
        return len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBody(VectorsBody):
    """The body of `/v1/score`: one text or several, and the texts that are scored with it, or with that of their place.

    vLLM has three pairs of names for the two fields.
    """

    text_1: Annotated[Any, _check_strings] = None
    text_2: Annotated[Any, _check_strings] = None
    queries: Annotated[Any, _check_strings] = None
    documents: Annotated[Any, _check_strings] = None
    data_1: Annotated[Any, _check_strings] = None
    data_2: Annotated[Any, _check_strings] = None
    use_activation: Flag = True

    texts_field = "text_2"

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The texts of both fields."""
        for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
            given = [getattr(self, name) for name in names]
            if any(each is not None for each in given):
                break
        else:
            raise InvalidInput("text_1", "is missing")
        for name, each in zip(names, given, strict=True):
            if each is None:
                raise InvalidInput(name, "is missing")
        first, second = (prompts_of(name, each, _MAX_INPUTS) for name, each in zip(names, given, strict=True))
        return first, second

    @property
    def num_texts(self) -> int:
        """Number of pairs."""
        return max(map(len, self.pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankBody(VectorsBody):
    """The body of `/v1/rerank`: the `top_n` documents that fit best, or all (0), as texts or as objects with text."""

    query: Text
    documents: List
    top_n: Annotated[int, Limits(0)] = 0
    return_documents: Flag = True
    use_activation: Flag = True

    texts_field = "documents"

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        found: list[str] = []
        for index, given in enumerate(self.documents):
            text = given.get("text") if isinstance(given, dict) else given
            if not isinstance(text, str):
                wanted = "it must be a text, or an object with one as text"
                raise InvalidInput(f"documents[{index}]", value=given, wanted=wanted)
            found.append(text)
        if not 0 < len(found) <= _MAX_INPUTS:
            raise InvalidInput("documents", f"has {len(found)} entries", f"it must have 1 to {_MAX_INPUTS}")
        return found

    @property
    def num_texts(self) -> int:
        """Number of documents."""
        return len(self.texts)


def read_body(kind: type[_B], body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> _B:
    """Returns a body with its fields checked; `defaults` has values of fields that the JSON object does not have."""
    given = dict(defaults or {}) | {name: each for name, each in body.items() if each is not None}
    passed = _SAMPLING & given.keys() if issubclass(kind, GenerationBody) else set()
    for name in given.keys() - passed - kind.__dataclass_fields__.keys() | given.keys() & {"sampling"}:
        _check_unused(name, given.pop(name))
    for each in fields(kind):
        if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
            raise InvalidInput(each.name, "is missing")
    if passed:
        given["sampling"] = {name: given.pop(name) for name in passed}
    return kind(**given)


def prompts_of(name: str, value: Any, most: int) -> list[Any]:
    """Returns the prompts of a field that holds one or several, `most` at most."""
    prompts = [value] if isinstance(value, str) or isinstance(value[0], int) else list(value)
    if len(prompts) > most:
        raise InvalidInput(name, f"has {len(prompts)} entries", f"it must have {most} at most")
    return prompts


def _check_unused(name: str, value: Any) -> None:
    """Refuses a field that no endpoint reads, unless it asks for nothing."""
    if name not in UNUSED:
        raise InvalidInput(name, "is not a field of this request")
    values = UNUSED[name]
    if values is None:
        _note_unused(name)
    elif not any(type(value) is type(each) and value == each for each in values):
        wanted = " or ".join(map(shown, values))
        raise InvalidInput(name, value=value, wanted=f"this server takes only {wanted} here, which asks for nothing")


@functools.cache
def _note_unused(name: str) -> None:
    """Logs once that clients send a field."""
    _log.info("clients send %s, which changes no answer of this server", name)
