"""What OpenAI's clients send, turned into prompts and SamplingParams; every refusal names its field."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jattn.engine import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.engine.prompts import Prompt
from jattn.load.folder import read_json
from torch_core.checks import shown
from torch_core.errors import InvalidInput, RequestTooLong

__all__ = ["Generation", "RequestError", "as_request_error", "parse_body", "parse_chat", "parse_completion"]

# Fields that are SamplingParams' own, by name and meaning.
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "logits_processors"),
)
# What clients send that changes nothing of the answer.
_IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
_MAX_PROMPTS = 256
_MAX_TOP_LOGPROBS = 20


class RequestError(Exception):
    """A refusal over HTTP.

    Attributes:
        status: of the response.
        param: the field that is wrong; None where none is.
        code: for programs; None where the status says it all.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Generation:
    """What is to be generated, and how the answer looks.

    Attributes:
        prompts: of a completion; a chat has one, to be made from `messages`.
        params: for all of them.
        model: as the client names it.
        stream: answer by server-sent events.
        include_usage: end a stream with the counts of tokens.
        echo: begin the answer with the prompt.
        num_choices: of each prompt; below params.n they are the best.
        salt: only requests of equal salt share cached prefixes.
        priority: lower comes first.
        messages, template: of a chat, with what its template takes.
    """

    prompts: list[Prompt]
    params: SamplingParams
    model: str | None
    stream: bool
    include_usage: bool
    echo: bool
    num_choices: int
    salt: bytes | None
    priority: int
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None


def parse_body(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request's body.

    Raises:
        RequestError: it is anything else.
    """
    try:
        return read_json(body.decode(), "the body")
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 text (byte {error.start}).") from None
    except InvalidInput as error:
        raise RequestError(400, str(error)) from None


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/completions`.

    Args:
        body: of the request.
        defaults: fields that hold where the body does not have them.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = _Fields(body, defaults)
    prompt = fields.take("prompt", _is_prompt, "a string, token ids, or a list of either")
    if prompt is None:
        raise RequestError(400, "prompt is missing.", param="prompt")
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: list[Prompt] = [prompt] if is_one else list(prompt)
    if len(prompts) > _MAX_PROMPTS:
        raise RequestError(
            400, f"prompt has {len(prompts)} entries; it must have {_MAX_PROMPTS} at most.", param="prompt"
        )
    if fields.take("suffix", lambda value: True, "null") is not None:
        raise RequestError(400, "suffix is given; this server does not fill in the middle.", param="suffix")
    changes = {"max_tokens": fields.number("max_tokens", 16), "logprobs": fields.number("logprobs", None)}
    best_of = fields.number("best_of", None)
    echo = fields.flag("echo")
    if echo and changes["logprobs"] is not None:
        changes["prompt_logprobs"] = changes["logprobs"]
    generation = _generation(fields, prompts, changes, echo=echo, best_of=best_of)
    if echo and generation.stream:
        raise RequestError(400, "echo is true and stream is true; a stream has new text alone.", param="echo")
    return generation


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/chat/completions`; arguments as of `parse_completion`.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = _Fields(body, defaults)
    messages = fields.take("messages", lambda value: isinstance(value, list), "a list of messages")
    if not messages:
        raise RequestError(400, "messages is missing or empty.", param="messages")
    older_name = fields.number("max_tokens", None)
    changes: dict[str, Any] = {"max_tokens": fields.number("max_completion_tokens", older_name)}
    top_logprobs = fields.number("top_logprobs", None)
    if fields.flag("logprobs"):
        changes["logprobs"] = top_logprobs or 0
    elif top_logprobs is not None:
        raise RequestError(400, "top_logprobs is given without logprobs: true.", param="top_logprobs")
    if top_logprobs is not None and not 0 <= top_logprobs <= _MAX_TOP_LOGPROBS:
        message = f"top_logprobs is {shown(top_logprobs)}; it must be from 0 to {_MAX_TOP_LOGPROBS}."
        raise RequestError(400, message, param="top_logprobs")
    tools = fields.take("tools", _is_objects, "a list of objects")
    choice = fields.take(
        "tool_choice", lambda value: value in ("auto", "none"), '"auto" or "none"; others are not served'
    )
    variables = fields.take("chat_template_kwargs", lambda value: isinstance(value, dict), "an object") or {}
    template = variables | {"tools": None if choice == "none" else tools}
    template["add_generation_prompt"] = fields.flag("add_generation_prompt", default=True)
    listed = [_message(index, message) for index, message in enumerate(messages)]
    return _generation(fields, [], changes, messages=listed, template=template)


def as_request_error(error: Exception, *, default: str | None = None) -> RequestError:
    """Returns the refusal for an error of ours; the field is the one that its message begins with.

    Args:
        error: anything; what is not the client's fault becomes a 500 that says nothing of the inside.
        default: the field where the message begins with none.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, InvalidInput):
        return RequestError(500, "the server failed on this request.", code="internal_error")
    names = re.findall(r"[a-z][a-z_]*", str(error)[:80])
    known = (
        *_SAMPLING,
        "max_tokens",
        "logprobs",
        "logit_bias",
        "seed",
        "priority",
        "structured_outputs",
        "messages",
        "prompt",
    )
    param = next((name for name in names if name in known), default)
    param = default if param == "prompt" else param
    if isinstance(error, RequestTooLong):
        return RequestError(400, str(error), param=default, code="context_length_exceeded")
    return RequestError(400, str(error), param=param)


class _Fields:
    """The fields of a body, taken out one by one, so that what is left is unknown."""

    def __init__(self, body: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> None:
        # A field that is null is as one that is missing.
        given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        self._left = {**(defaults or {}), **given}

    def take(self, name: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """Returns a field, None if it is missing or null."""
        value = self._left.pop(name, None)
        if value is not None and not fits(value):
            raise RequestError(400, f"{name} is {shown(value)}; it must be {wanted}.", param=name)
        return value

    def number(self, name: str, default: int | None) -> int | None:
        value = self.take(name, lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number")
        return default if value is None else value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name, lambda value: isinstance(value, bool), "true or false")
        return default if value is None else value

    def finish(self) -> None:
        """Refuses what nobody took."""
        for name in self._left:
            raise RequestError(400, f"{shown(name)} is no field of this request.", param=name)


def _generation(
    fields: _Fields,
    prompts: list[Prompt],
    changes: dict[str, Any],
    *,
    echo: bool = False,
    best_of: int | None = None,
    messages: list[dict[str, Any]] | None = None,
    template: dict[str, Any] | None = None,
) -> Generation:
    """Reads what completions and chats have in common."""
    model = fields.take("model", lambda value: isinstance(value, str), "a string")
    stream = fields.flag("stream")
    options = fields.take("stream_options", lambda value: isinstance(value, dict), "an object") or {}
    salt = fields.take(
        "cache_salt", lambda value: isinstance(value, str) and 0 < len(value) <= 64, "1 to 64 characters"
    )
    priority = fields.number("priority", 0) or 0
    for name in _SAMPLING:
        value = fields.take(name, lambda value: True, "")
        if value is not None:
            changes[name] = value
    seed = fields.number("seed", None)
    changes["seed"] = None if seed is None else seed & 0xFFFFFFFF
    changes["logit_bias"] = _bias(fields.take("logit_bias", lambda value: isinstance(value, dict), "an object"))
    changes["structured_outputs"] = _structured(fields)
    changes["output_kind"] = RequestOutputKind.FINAL_ONLY
    fields.finish()
    num_choices = changes.get("n", 1)
    if best_of is not None:
        if stream and best_of != num_choices:
            raise RequestError(
                400, "best_of is given and stream is true; the best is known at the end.", param="best_of"
            )
        if not isinstance(num_choices, int) or best_of < num_choices:
            raise RequestError(
                400, f"best_of is {best_of}; it must be at least n ({shown(num_choices)}).", param="best_of"
            )
        if best_of > num_choices:
            changes |= {"n": best_of, "logprobs": changes.get("logprobs") or 0}
    try:
        params = SamplingParams(**changes)
    except InvalidInput as error:
        raise as_request_error(error) from None
    return Generation(
        prompts,
        params,
        model,
        stream,
        bool(options.get("include_usage")),
        echo,
        num_choices,
        # Of any text, and none is another one's beginning.
        None if salt is None else hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest(),
        priority,
        messages,
        template,
    )


def _structured(fields: _Fields) -> StructuredOutputsParams | None:
    wanted = fields.take("structured_outputs", lambda value: isinstance(value, dict), "an object")
    form = fields.take("response_format", _is_format, "an object with a type: text, json_object or json_schema")
    name = "structured_outputs" if form is None or form["type"] == "text" else "response_format"
    try:
        if form is None or form["type"] == "text":
            return None if wanted is None else StructuredOutputsParams(**wanted)
        if wanted is not None:
            raise InvalidInput("response_format and structured_outputs are both given.")
        if form["type"] == "json_object":
            return StructuredOutputsParams(json_object=True)
        described = form.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise InvalidInput("response_format has no json_schema with a schema.")
        # Between the parts a small model may go on with spaces for ever.
        return StructuredOutputsParams(json=described["schema"], disable_any_whitespace=described.get("strict") is True)
    except (InvalidInput, TypeError) as error:
        raise RequestError(400, f"{name}: {error}", param=name) from None


def _message(index: int, message: Any) -> dict[str, Any]:
    """Returns a message with its content as text, which is what templates know."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, f"{name} is {shown(message)}; it must be an object with a role.", param=name)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) != len(content):
            raise RequestError(
                400, f"{name}.content has parts that are no text; this server takes text alone.", param=name
            )
        content = "\n".join(texts)
    if not isinstance(content, str | None):
        raise RequestError(400, f"{name}.content is {shown(content)}; it must be text.", param=name)
    return message | {"content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _bias(bias: Mapping[str, Any] | None) -> dict[int, Any] | None:
    if bias is None:
        return None
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(400, f"logit_bias has {shown(token)}; its names must be token ids.", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return bool(isinstance(value, list) and value) and (
        _is_tokens(value) or all(isinstance(each, str) or (_is_tokens(each) and bool(each)) for each in value)
    )


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")
