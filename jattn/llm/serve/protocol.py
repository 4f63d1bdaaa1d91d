"""Bodies of OpenAI's clients to prompts and SamplingParams; every error names its field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jattn.llm.engine import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jattn.llm.load.folder import read_json
from jattn.llm.serve.bodies import ChatBody, CompletionBody, GenerationBody, prompts_of, read_body
from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.keys import digest
from jattn.llm.serve.tools import ToolUse, read_tools
from jattn.llm.text.messages import as_message
from jattn.llm.text.prompts import Prompt, check_template_kwargs
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

_MAX_PROMPTS = 256
# Of lists, objects and fields in a body: the parser holds Python's lock while it makes them.
_MAX_PARTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to generate, and the form of its answer.

    Attributes:
        prompts: the prompts of a completion. A chat has one, which is made from `messages`.
        prompt_alone: return the prompt alone, without the one token that is generated after it.
        aliases: fields of `params` to the fields that the client gave in their place.
        num_choices: samples that are returned of each prompt. If that is less than params.n, the best are.
        grammar_field: the field that holds the structured output; None without one.
        template: further arguments of a chat's template; `chat_template` is the client's own.
        tools: tools that a chat's answer may call.
        includes_reasoning: whether a chat's answer has its reasoning.
        prompt_field: the field that holds the prompts or the conversation.
        returns_token_ids: whether a whole answer has the token ids of prompts and choices.
    """

    body: GenerationBody
    params: SamplingParams
    num_choices: int
    prompts: list[Prompt] = field(default_factory=list)
    echo: bool = False
    prompt_alone: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    salt: bytes | None = None
    grammar_field: str | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None
    chat_template: str | None = None
    tools: ToolUse | None = None
    includes_reasoning: bool = True
    prompt_field: str = "prompt"
    returns_token_ids: bool = False

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that a chat's text must have, if `response_format` has one."""
        wanted = self.params.structured_outputs if self.body.response_format is not None else None
        if wanted is None or (wanted.json is None and not wanted.json_object):
            return None
        schema = wanted.json if isinstance(wanted.json, dict) else {"type": "object"}
        return {**schema, "x-guidance": {"whitespace_flexible": not wanted.disable_any_whitespace}}


def parse_body(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request's body."""
    if sum(map(body.count, (b"[", b"{", b":"))) > _MAX_PARTS:
        raise RequestError(400, f"the body has more than {_MAX_PARTS} lists, objects and fields.")
    try:
        return read_json(body.decode(), "the body")
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8 text (byte {error.start}).") from None
    except InvalidInput as error:
        raise RequestError(400, str(error)) from None


def parse_completion(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/completions`; `defaults` has values of fields that it leaves out."""
    asked = read_body(CompletionBody, body, defaults)
    if asked.echo and asked.stream:
        raise InvalidInput("echo", "is true and stream is true", "a stream has new text alone")
    changes: dict[str, Any] = {"max_tokens": asked.max_tokens, "logprobs": asked.logprobs, **asked.sampling}
    if asked.echo and asked.logprobs is not None:
        changes["prompt_logprobs"] = asked.logprobs
    # OpenAI's way to score a text: the prompt with its log-probabilities and no new text.
    prompt_alone = asked.echo and asked.max_tokens == 0
    if prompt_alone:
        changes["max_tokens"] = 1
    num_choices, aliases = changes.get("n", 1), {}
    if (best_of := asked.best_of) is not None:
        if asked.stream and best_of != num_choices:
            raise InvalidInput("best_of", "is given and stream is true", "the best is known at the end")
        if not isinstance(num_choices, int) or best_of < num_choices:
            raise InvalidInput("best_of", value=best_of, wanted=f"it must be at least n ({shown(num_choices)})")
        if best_of > num_choices:
            changes |= {"n": best_of, "logprobs": asked.logprobs or 0}
            aliases = {"n": "best_of"}
    return _generation(
        asked,
        changes,
        aliases,
        num_choices=num_choices,
        prompts=prompts_of("prompt", asked.prompt, _MAX_PROMPTS),
        echo=asked.echo,
        prompt_alone=prompt_alone,
        returns_token_ids=asked.return_token_ids,
    )


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Generation:
    """Reads the body of `/v1/chat/completions`; arguments as of `parse_completion`."""
    asked = read_body(ChatBody, body, defaults)
    if not asked.messages:
        raise InvalidInput("messages", "is empty", "give at least one message")
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidInput("top_logprobs", "is given without logprobs: true")
    check_template_kwargs(asked.chat_template_kwargs)
    changes: dict[str, Any] = {"max_tokens": asked.max_tokens, **asked.sampling}
    aliases = {}
    if asked.max_completion_tokens is not None:
        changes["max_tokens"], aliases = asked.max_completion_tokens, {"max_tokens": "max_completion_tokens"}
    if asked.logprobs:
        changes["logprobs"] = asked.top_logprobs or 0
    tools = read_tools(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls)
    if tools is not None and tools.required and asked.structured_outputs is not None:
        raise InvalidInput("structured_outputs", "is given", "a required call has the tools' format: leave one out")
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    template = {
        "chat_template_kwargs": effort | asked.chat_template_kwargs,
        "tools": None if asked.tool_choice == "none" else asked.tools,
        "add_generation_prompt": asked.add_generation_prompt,
    }
    return _generation(
        asked,
        changes,
        aliases,
        num_choices=changes.get("n", 1),
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(asked.messages)],
        template=template,
        chat_template=asked.chat_template,
        tools=tools,
        includes_reasoning=asked.include_reasoning,
        prompt_field="messages",
        returns_token_ids=asked.return_token_ids,
    )


def parse_as_chat(
    asked: GenerationBody, chat: Mapping[str, Any], *, names: Mapping[str, str], prompt_field: str
) -> Generation:
    """Reads a body of another form as a chat's.

    Args:
        asked: the body, whose common fields the chat has too.
        chat: the chat's other fields.
        names: fields of a chat to those of the body that stand for them.
        prompt_field: the body's field that holds the conversation.
    """
    common = GenerationBody.__dataclass_fields__.keys() - {"sampling", "response_format"} - chat.keys()
    try:
        found = parse_chat({**asked.sampling, **{name: getattr(asked, name) for name in common}, **chat})
    except Exception as error:
        problem = as_request_error(error)
        raise RequestError(problem.status, str(problem), param=names.get(problem.param or "", problem.param)) from None
    return replace(
        found,
        prompt_field=prompt_field,
        aliases={**names, **{name: names.get(given, given) for name, given in found.aliases.items()}},
        grammar_field=names.get(found.grammar_field or "", found.grammar_field),
    )


def _generation(body: GenerationBody, changes: dict[str, Any], aliases: Mapping[str, str], **form: Any) -> Generation:
    """Returns a request with the common fields of completions and chats."""
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options", "is given", "it needs stream: true", value=body.stream_options)
    if changes.get("prompt_logprobs") is not None and body.stream and not form.get("echo"):
        raise InvalidInput("prompt_logprobs", "is given and stream is true", "only a whole answer has them")
    if form["returns_token_ids"] and body.stream:
        raise InvalidInput("return_token_ids", "is true and stream is true", "only a whole answer has them")
    for name in ("logprobs", "prompt_logprobs"):
        if changes.get(name) == -1:
            raise InvalidInput(name, value=-1, wanted="an answer has those of some tokens at each place, not of all")
    grammar_field, structured_outputs = _structured(body)
    if form.get("tools") is not None:
        grammar_field = grammar_field or "tools"
    try:
        params = SamplingParams(
            **changes,
            seed=None if body.seed is None else body.seed & 0xFFFFFFFF,
            logit_bias=_bias(body.logit_bias),
            structured_outputs=structured_outputs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except InvalidInput as error:
        raise as_request_error(error, aliases=aliases) from None
    # A digest has one length, so that no salt is the beginning of another one.
    salt = None if body.cache_salt is None else digest(body.cache_salt)
    return Generation(body=body, params=params, salt=salt, grammar_field=grammar_field, aliases=aliases, **form)


def _structured(body: GenerationBody) -> tuple[str | None, StructuredOutputsParams | None]:
    """Returns the field with the required format of the text, and its value for SamplingParams."""
    wanted, form = body.structured_outputs, body.response_format
    for unknown in (wanted or {}).keys() - StructuredOutputsParams.__dataclass_fields__:
        raise InvalidInput("structured_outputs", f"has no {shown(unknown)}")
    if form is None or form["type"] == "text":
        form, name = None, "structured_outputs"
    else:
        name = "response_format"
    if form is None and wanted is None:
        return None, None
    try:
        if form is None:
            return name, StructuredOutputsParams(**(wanted or {}))
        if wanted is not None:
            raise InvalidInput("response_format and structured_outputs are both given.")
        if form["type"] == "json_object":
            return name, StructuredOutputsParams(json_object=True)
        described = form.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            wanted = 'it must be {"name": ..., "schema": {...}}'
            raise InvalidInput("json_schema", value=described, wanted=wanted)
        # Without it, a small model may add spaces between the parts without end.
        strict = described.get("strict") is True
        return name, StructuredOutputsParams(json=described["schema"], disable_any_whitespace=strict)
    except InvalidInput as error:
        raise RequestError(400, str(error.under(name)), param=name) from None


def _message(name: str, message: Any) -> dict[str, Any]:
    try:
        return as_message(name, message)
    except InvalidInput as error:
        raise RequestError(400, str(error), param=name) from None


def _bias(bias: Mapping[str, Any] | None) -> dict[int, Any] | None:
    for token in bias or ():
        # One name for each token: of "5" and "05" the later would count, as of a field that comes twice.
        if not (token.isascii() and token.isdigit() and len(token) < 10 and token == str(int(token))):
            raise InvalidInput("logit_bias", f"has {shown(token)}", "its names must be token ids")
    return None if bias is None else {int(token): value for token, value in bias.items()}
