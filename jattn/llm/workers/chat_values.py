"""Values of messages that chat templates of one habit print and those of another test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class NoText(str):
    """A content that is null: "" where a template prints it, none where a template tests it.

    vLLM gives "" to every template and transformers None. A template that joins texts fails on None, and DeepSeek's
    finds a tool call by `content is none`.
    """

    __slots__ = ()

    def __new__(cls) -> NoText:
        return super().__new__(cls, "")

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Arguments(dict[str, Any]):
    """The arguments of a call: an object that becomes its JSON text where a template prints or joins it.

    vLLM gives the object to every template; DeepSeek's joins texts.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def is_none(value: object) -> bool:
    """Returns whether a template sees none: the test `is none`."""
    return value is None or isinstance(value, NoText)


def as_template_value(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with a null content as `NoText`, and its calls' arguments as `Arguments`."""
    found = dict(message)
    if found.get("content", "") is None:
        found["content"] = NoText()
    if isinstance(calls := found.get("tool_calls"), list | tuple):
        found["tool_calls"] = [_as_call(call) for call in calls]
    return found


def _as_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": Arguments(function["arguments"])}}
