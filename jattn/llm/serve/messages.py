"""The message of a chat's answer: text, reasoning and calls, whole or piece by piece."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jattn.llm.tools.parser import AnswerParser, Part, Reading

_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call, with the JSON text of its arguments."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A whole answer.

    Attributes:
        text: its text; None if there is none besides calls or reasoning.
        reasoning: its reasoning; None if there is none.
        calls: its calls.
    """

    text: str | None
    reasoning: str | None = None
    calls: list[CalledTool] = field(default_factory=list)


class MessageReader:
    """Reads one answer as it comes.

    Args:
        reading: the formats; None for text alone.
        includes_reasoning: whether reasoning is returned.

    Attributes:
        num_calls: number of calls so far.
    """

    def __init__(self, reading: Reading | None, includes_reasoning: bool = True) -> None:
        self._parser = None if reading is None else AnswerParser(reading)
        self._includes_reasoning = includes_reasoning
        self.num_calls = 0

    def read(self, text: str, *, finished: bool) -> list[Part]:
        """Returns the parts of a further text."""
        if self._parser is None:
            return [Part("text", text)] if text else []
        parts = self._parser.feed(text, finished=finished)
        self.num_calls += sum(part.kind == "name" for part in parts)
        return [part for part in parts if self._includes_reasoning or part.kind != "reasoning"]


def new_call_id(reading: Reading | None) -> str:
    """Returns the id of a call, in the form that the model's chat template takes."""
    length = None if reading is None or reading.tools is None else reading.tools.id_length
    return f"call_{secrets.token_hex(_ID_BYTES)}" if length is None else secrets.token_hex(length)[:length]


def delta(part: Part, reading: Reading | None) -> dict[str, Any]:
    """Returns OpenAI's delta of a part."""
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
    function = {"name": part.text, "arguments": ""}
    return {"tool_calls": [{"index": part.call, "id": new_call_id(reading), "type": "function", "function": function}]}


def message_of(reading: Reading | None, text: str, *, cut: bool, includes_reasoning: bool = True) -> ChatMessage:
    """Returns the message of a whole text.

    A call whose arguments are no JSON object is text, except for the last one of a text that was cut.
    """
    if reading is None:
        return ChatMessage(text)
    parser = AnswerParser(reading)
    parts = parser.feed(text, finished=True)
    arguments = [_joined(parts, "arguments", call) for call in range(len(parser.spans))]
    calls, said = list[CalledTool](), list[str]()
    for part in parts:
        if part.kind == "text":
            said.append(part.text)
        elif part.kind == "name":
            is_last = part.call == len(arguments) - 1
            if object_of(arguments[part.call]) is not None or (cut and is_last):
                calls.append(CalledTool(new_call_id(reading), part.text, arguments[part.call]))
            else:
                begin, end = parser.spans[part.call]
                said.append(text[begin:end])
    reasoning = _joined(parts, "reasoning") or None
    found = "".join(said)
    is_empty = not found and (bool(calls) or reasoning is not None)
    return ChatMessage(None if is_empty else found, reasoning if includes_reasoning else None, calls)


def object_of(text: str) -> dict[str, Any] | None:
    """Returns a JSON object; None of another text, such as the arguments of a call that was cut."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _joined(parts: Iterable[Part], kind: str, call: int = 0) -> str:
    return "".join(part.text for part in parts if part.kind == kind and part.call == call)
