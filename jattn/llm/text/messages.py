"""Messages of a conversation, from the forms that OpenAI's clients send to the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jattn.llm.load.folder import read_json
from torch_core.base.errors import InvalidInput

#: Types of parts that are text, and the field that has it.
_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}


def as_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages of a conversation as `as_message` does, which names them "messages[0]" and so on."""
    return [as_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def as_message(name: str, message: Any) -> dict[str, Any]:
    """Returns a message in the form that vLLM passes to a chat template.

    A content of several parts becomes one text. The arguments of a call become an object. A key that is null, and
    `tool_calls` without a call, are left out: templates test whether they are there. Only `content` stays null.

    Raises:
        InvalidInput: it has no role, a content that is not text, or a call that is none; the argument begins with
            `name`.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInput(name, value=message, wanted="it must be an object with a role")
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _text(f"{name}.content", message.get("content"))
    calls = found.pop("tool_calls", None)
    if calls is not None and not (isinstance(calls, list | tuple) and all(_is_call(call) for call in calls)):
        raise InvalidInput(f"{name}.tool_calls", value=calls, wanted="it must be a list of objects with a function")
    if calls:
        found["tool_calls"] = [{**call, "function": _with_arguments(name, call["function"])} for call in calls]
    return found


def _text(name: str, content: Any) -> str | None:
    if isinstance(content, list | tuple):
        parts = [part if isinstance(part, str) else _text_of(part) for part in content]
        if None in parts:
            raise InvalidInput(name, "has parts that are not text", "it must be text")
        content = "\n".join(part for part in parts if part is not None)
    if not isinstance(content, str | None):
        raise InvalidInput(name, value=content, wanted="it must be text")
    return content


def _text_of(part: Any) -> str | None:
    text = part.get(_TEXTS.get(str(part.get("type")), "")) if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _with_arguments(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a called function with its arguments as an object: OpenAI has JSON in a text."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    try:
        return {**function, "arguments": read_json(given, "arguments") if isinstance(given, str) else given}
    except InvalidInput as error:
        raise error.under(f"{name}.tool_calls") from None


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
