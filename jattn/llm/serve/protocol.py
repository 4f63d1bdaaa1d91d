"""Converts OpenAI's requests to prompts and SamplingParams; every refusal names its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jattn.llm.engine import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.llm.load.folder import read_json
from jattn.llm.serve.fields import SAMPLING, Fields, RequestError, as_request_error, is_prompt, is_tokens
from jattn.llm.serve.keys import digest
from jattn.llm.text.prompts import Prompt, check_template_kwargs
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

__all__ = [
    "Generation",
    "TokenizeRequest",
    "parse_body",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_tokenize",
]

_MAX_PROMPTS = 256
_MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Generation:
    """The requested generation, and the form of the answer.

    Attributes:
        prompts: of a completion; a chat has one, to be made from `messages`.
        params: for all of them.
        model: as the client names it.
        stream: answer by server-sent events.
        include_usage: end a stream with the counts of tokens.
        echo: begin the answer with the prompt.
        prompt_alone: answer with nothing else; the one token that is generated for it is left out.
        aliases: names of fields of params to those that the client wrote in their place.
        num_choices: of each prompt; below params.n they are the best.
        salt: only requests of equal salt share cached prefixes.
        priority: lower comes first.
        grammar_field: the field with the required format of the text; None without one.
        messages, template: of a chat, with the arguments of its template.
        chat_template: that the client sends.
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
    grammar_field: str | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None
    chat_template: str | None = None
    prompt_alone: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


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
        defaults: fields that hold if the body does not have them.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = Fields(body, defaults)
    prompt = fields.take("prompt", is_prompt, "a string, token ids, or a list of either")
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
    # As OpenAI's completions have it, to score a text: the prompt's own log-probabilities.
    prompt_alone = echo and changes["max_tokens"] == 0
    if prompt_alone:
        changes["max_tokens"] = 1
    generation = _generation(fields, prompts, changes, echo=echo, best_of=best_of)
    if echo and generation.stream:
        raise RequestError(400, "echo is true and stream is true; a stream has new text alone.", param="echo")
    return replace(generation, prompt_alone=prompt_alone)


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/chat/completions`; arguments as of `parse_completion`.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = Fields(body, defaults)
    messages = fields.take("messages", lambda value: isinstance(value, list), "a list of messages")
    if not messages:
        raise RequestError(400, "messages is missing or empty.", param="messages")
    older_name, newer_name = (fields.number(name, None) for name in ("max_tokens", "max_completion_tokens"))
    changes: dict[str, Any] = {"max_tokens": older_name if newer_name is None else newer_name}
    aliases = {} if newer_name is None else {"max_tokens": "max_completion_tokens"}
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
    variables = fields.object("chat_template_kwargs") or {}
    try:
        check_template_kwargs(variables)
    except InvalidInput as error:
        raise as_request_error(error) from None
    template = {
        "chat_template_kwargs": variables,
        "tools": None if choice == "none" else tools,
        "add_generation_prompt": fields.flag("add_generation_prompt", default=True),
    }
    listed = [_message(index, message) for index, message in enumerate(messages)]
    source = fields.text("chat_template")
    return _generation(fields, [], changes, aliases=aliases, messages=listed, template=template, chat_template=source)


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """The body of `/tokenize` or `/detokenize`.

    Attributes:
        model: as the client names it.
        text: to be encoded.
        token_ids: to be decoded.
        add_special_tokens: as the tokenizer does for a prompt.
    """

    model: str | None
    text: str = ""
    token_ids: Sequence[int] = ()
    add_special_tokens: bool = True


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Reads the body of `/tokenize` with a prompt.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    model, prompt = fields.text("model"), fields.text("prompt")
    add_special_tokens = fields.flag("add_special_tokens", default=True)
    fields.finish()
    if prompt is None:
        raise RequestError(400, "prompt is missing.", param="prompt")
    return TokenizeRequest(model, text=prompt, add_special_tokens=add_special_tokens)


def parse_detokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Reads the body of `/detokenize`.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    model = fields.text("model")
    tokens = fields.take("tokens", lambda value: is_tokens(value) and min(value, default=0) >= 0, "a list of token ids")
    fields.finish()
    if tokens is None:
        raise RequestError(400, "tokens is missing.", param="tokens")
    return TokenizeRequest(model, token_ids=tokens)


def _generation(
    fields: Fields,
    prompts: list[Prompt],
    changes: dict[str, Any],
    *,
    echo: bool = False,
    best_of: int | None = None,
    aliases: Mapping[str, str] | None = None,
    messages: list[dict[str, Any]] | None = None,
    template: dict[str, Any] | None = None,
    chat_template: str | None = None,
) -> Generation:
    """Reads the common fields of completions and chats; `aliases` are the client's names for fields of `changes`."""
    model = fields.text("model")
    stream = fields.flag("stream")
    include_usage = _includes_usage(fields, stream=stream)
    salt = fields.take(
        "cache_salt", lambda value: isinstance(value, str) and 0 < len(value) <= 64, "1 to 64 characters"
    )
    priority = fields.number("priority", 0) or 0
    for name in SAMPLING:
        value = fields.take(name, lambda value: True, "")
        if value is not None:
            changes[name] = value
    seed = fields.number("seed", None)
    changes["seed"] = None if seed is None else seed & 0xFFFFFFFF
    changes["logit_bias"] = _bias(fields.object("logit_bias"))
    grammar_field, changes["structured_outputs"] = _structured(fields)
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
            aliases = {"n": "best_of"}
    asked = changes.get("prompt_logprobs")
    if asked is not None and stream and not echo:
        raise RequestError(
            400, "prompt_logprobs is given and stream is true; only a whole answer has them.", param="prompt_logprobs"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if changes.get(name) == -1:
            raise RequestError(
                400, f"{name} is -1; an answer has those of some tokens at each place, not of all.", param=name
            )
    try:
        params = SamplingParams(**changes)
    except InvalidInput as error:
        raise as_request_error(error, aliases=aliases) from None
    return Generation(
        prompts,
        params,
        model,
        stream,
        include_usage,
        echo,
        num_choices,
        # Of any text, and none is another one's beginning.
        None if salt is None else digest(salt),
        priority,
        grammar_field,
        messages,
        template,
        chat_template,
        aliases=aliases or {},
    )


def _includes_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream or not set(options) <= {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise RequestError(
            400,
            f"stream_options is {shown(options)}; it must be an object with include_usage, true or false, beside "
            "stream: true.",
            param="stream_options",
        )
    return options.get("include_usage", False)


def _structured(fields: Fields) -> tuple[str | None, StructuredOutputsParams | None]:
    """Returns the field with the required format of the text, and the format."""
    wanted = fields.object("structured_outputs")
    for unknown in (wanted or {}).keys() - StructuredOutputsParams.__dataclass_fields__:
        raise RequestError(400, f"structured_outputs has no {shown(unknown)}.", param="structured_outputs")
    form = fields.take("response_format", _is_format, "an object with a type: text, json_object or json_schema")
    name = "structured_outputs" if form is None or form["type"] == "text" else "response_format"
    try:
        if form is None or form["type"] == "text":
            return (None, None) if wanted is None else (name, StructuredOutputsParams(**wanted))
        if wanted is not None:
            raise InvalidInput("response_format and structured_outputs are both given.")
        if form["type"] == "json_object":
            return name, StructuredOutputsParams(json_object=True)
        described = form.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise InvalidInput("response_format has no json_schema with a schema.")
        # Between the parts a small model may go on with spaces for ever.
        strict = described.get("strict") is True
        return name, StructuredOutputsParams(json=described["schema"], disable_any_whitespace=strict)
    except (InvalidInput, TypeError) as error:
        raise RequestError(400, f"{name}: {error}", param=name) from None


def _message(index: int, message: Any) -> dict[str, Any]:
    """Returns a message with its content as text, which templates expect."""
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
    if message.get("tool_calls") is None:
        return message | {"content": content}
    calls = message["tool_calls"]
    if not _is_objects(calls) or not all(isinstance(call.get("function"), dict) for call in calls):
        raise RequestError(
            400, f"{name}.tool_calls is {shown(calls)}; it must be a list of objects with a function.", param=name
        )
    called = [{**call, "function": _with_arguments(name, call["function"])} for call in calls]
    return message | {"content": content, "tool_calls": called}


def _with_arguments(name: str, function: dict[str, Any]) -> dict[str, Any]:
    """Returns a called function whose arguments are an object: OpenAI's are JSON in a text, templates write objects."""
    given = function.get("arguments")
    if not isinstance(given, str):
        return function
    try:
        return function | {"arguments": read_json(given, "arguments") if given.strip() else {}}
    except InvalidInput as error:
        raise RequestError(400, f"{name}.tool_calls: {error}", param=name) from None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _bias(bias: Mapping[str, Any] | None) -> dict[int, Any] | None:
    if bias is None:
        return None
    for token in bias:
        # One name for each token: of "5" and "05" the later would count, as of a field that comes twice.
        if not (token.isascii() and token.isdigit() and len(token) < 10 and token == str(int(token))):
            raise RequestError(400, f"logit_bias has {shown(token)}; its names must be token ids.", param="logit_bias")
    return {int(token): value for token, value in bias.items()}


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")
