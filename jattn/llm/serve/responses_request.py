"""The body of `/v1/responses` as a chat: items become messages, and fields have the names that a chat's have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from jattn.llm.serve.bodies import Flag, GenerationBody, List, Object, Text, Whole, read_body, text_of
from jattn.llm.serve.protocol import Generation, parse_as_chat
from jattn.llm.text.messages import as_message
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput
from torch_core.base.limits import Limits

#: Fields of a chat, by their names in the client's body.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
_LOGPROBS = "message.output_text.logprobs"
# An encrypted reasoning is for servers that keep none: this one's is plain text.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


def _refused(why: str) -> Any:
    """Returns the type of a field that asks for something that is not served."""

    def refuse(name: str, value: Any) -> None:
        if value is not None and value is not False:
            raise InvalidInput(name, "is given", why)

    return Annotated[Any, refuse]


def _check_input(name: str, value: Any) -> None:
    if not isinstance(value, str | list):
        raise InvalidInput(name, value=value, wanted="it must be a string or a list of items")


def _check_include(name: str, value: Any) -> None:
    if not isinstance(value, list) or any(each not in _INCLUDED for each in value):
        raise InvalidInput(name, value=value, wanted=f"it must be a list of {' or '.join(_INCLUDED)}")


def _check_truncation(name: str, value: Any) -> None:
    if value != "disabled":
        raise InvalidInput(name, value=value, wanted='this server takes only "disabled" here')


_NOTHING_STORED = "this server stores no responses: send the whole conversation as input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(GenerationBody):
    """The body of `/v1/responses`; the parameters of sampling are a chat's."""

    input: Annotated[Any, _check_input]
    instructions: Text | None = None
    max_output_tokens: Whole | None = None
    tools: List | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    text: Object | None = None
    reasoning: Object | None = None
    top_logprobs: Annotated[int | None, Limits(0, 20, also="")] = None
    include: Annotated[list[Any], _check_include] = field(default_factory=list)
    truncation: Annotated[str, _check_truncation] = "disabled"
    max_tool_calls: Any = None
    chat_template_kwargs: Object | None = None
    chat_template: Text | None = None
    previous_response_id: _refused(_NOTHING_STORED) = None  # type: ignore[valid-type]
    conversation: _refused(_NOTHING_STORED) = None  # type: ignore[valid-type]
    background: _refused("this server answers a request while it is open: leave it out") = None  # type: ignore[valid-type]
    prompt: _refused("this server has no stored prompts: send input") = None  # type: ignore[valid-type]


def parse_response(
    body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> tuple[Generation, ResponsesBody]:
    """Reads the body of `/v1/responses`; `defaults` has values of fields that it leaves out."""
    asked = read_body(ResponsesBody, body, defaults)
    if asked.sampling.get("n", 1) != 1:
        raise InvalidInput("n", value=asked.sampling["n"], wanted="a response is one sample")
    if asked.response_format is not None:
        raise InvalidInput("response_format", "is given", "the field of this request is text.format")
    chat: dict[str, Any] = {
        "messages": _messages(asked),
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _format(asked.text),
        "tools": None if asked.tools is None else [_tool(index, each) for index, each in enumerate(asked.tools)],
        "tool_choice": _choice(asked.tool_choice),
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
        "logprobs": _LOGPROBS in asked.include or bool(asked.top_logprobs),
        **{name: getattr(asked, name) for name in _SHARED},
    }
    return parse_as_chat(asked, chat, names=_NAMES, prompt_field="input"), asked


#: Fields of a chat with the same meaning.
_SHARED = ("parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "chat_template")


def _messages(asked: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for index, item in enumerate(asked.input):
        name = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidInput(name, value=item, wanted="it must be an object")
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise InvalidInput(f"{name}.type", value=kind, wanted=f"this server takes {', '.join(_ITEMS)}")
        message = as_message(name, _ITEMS[kind](name, item))
        last = messages[-1] if messages else None
        # A chat's message of the assistant is reasoning, text and calls in one.
        if (
            message["role"] == "assistant"
            and last is not None
            and last["role"] == "assistant"
            and _continues(last, message)
        ):
            last |= {key: each for key, each in message.items() if key not in ("content", "tool_calls") and each}
            if message.get("content") is not None:
                last["content"] = message["content"]
            if message.get("tool_calls"):
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    if not messages:
        raise InvalidInput("input", "is empty", "give at least one item")
    return messages


def _continues(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Returns whether an item belongs to the message before it."""
    if message.get("content") is not None:
        return last.get("content") is None and not last.get("tool_calls")
    return bool(message.get("tool_calls"))


def _message(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidInput(f"{name}.role", value=role, wanted="it must be user, assistant, system or developer")
    # Most templates know the older name alone.
    return {"role": "system" if role == "developer" else role, "content": item.get("content")}


def _function_call(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = text_of(name, item, "call_id")
    function = {key: text_of(name, item, key) for key in ("name", "arguments")}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _function_call_output(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": text_of(name, item, "call_id"), "content": item.get("output")}


def _reasoning(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    parts = item.get("content") or ()
    if not isinstance(parts, Sequence) or not all(isinstance(each, Mapping) for each in parts):
        raise InvalidInput(f"{name}.content", value=parts, wanted="it must be a list of objects")
    text = "".join(each["text"] for each in parts if isinstance(each.get("text"), str))
    return {"role": "assistant", "content": None, "reasoning_content": text}


_ITEMS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _tool(index: int, tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise InvalidInput(f"tools[{index}]", "is no function", f"this server runs no tools ({shown(kind)}) of its own")
    return {"type": "function", "function": {key: each for key, each in tool.items() if key != "type"}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a chat's form of `text.format`."""
    form = None if text is None else text.get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise InvalidInput("text.format", value=form, wanted="it must be an object")
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {key: each for key, each in form.items() if key != "type"}}
