"""One incremental parser of answers: text, reasoning and calls, from a stream in pieces of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jattn.llm.tools.arguments import json_of_text, python_arguments
from jattn.llm.tools.formats import CHANNEL, HARMONY_ENDS, MESSAGE, START, ReasoningFormat, ToolFormat
from jattn.llm.tools.source import Malformed, Source, Wait

# Characters of a head, of a name or of an argument's name; more of them are text.
_MOST_OF_HEAD = 256
# White space in front of a call, which may be no part of the text.
_MOST_SPACE = 64
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_CALLED, _CHANNEL_NAME = re.compile(r"to=functions\.([\w.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: of its text, of its reasoning, or of a call.

    Attributes:
        kind: "name" begins a call; "arguments" has a piece of the JSON of its arguments.
        text: the piece.
        call: index of the call.
    """

    kind: Literal["text", "reasoning", "name", "arguments"]
    text: str
    call: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The reading of a request's answers.

    Attributes:
        tools: format of the calls; None for none.
        reasoning: format of the reasoning; None for none.
        schemas: schemas of the arguments by the names of the tools that may be called.
        opened: the prompt ended within the reasoning.
        most_calls: calls beyond this number are left out.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]]
    opened: bool = False
    most_calls: int | None = None


class AnswerParser:
    """Parses one answer. The parts, joined by their kind and call, do not depend on the pieces in which the text came.

    A malformed call is text from the place on at which it cannot be read.

    Args:
        reading: the formats.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._source = Source()
        self._parts: list[Part] = []
        self._num_calls = 0
        # Of the text and of the reasoning: white space that may be dropped, and whether it is at the beginning.
        self._held = {"text": "", "reasoning": ""}
        self._strips = {"text": False, "reasoning": True}
        # Where text begins that belongs to no finished part.
        self._mark = 0
        #: The places in the text at which each call begins and ends.
        self.spans: list[tuple[int, int]] = []
        self._run = self._answer()

    @property
    def text(self) -> str:
        """All text so far."""
        return self._source.text

    def feed(self, text: str, *, finished: bool = False) -> list[Part]:
        """Adds text and returns the parts that are certain now; with `finished`, no more will come."""
        self._source.feed(text, finished)
        next(self._run, None)
        parts, self._parts = self._parts, []
        return parts

    def _answer(self) -> Wait[None]:
        tools, reasoning = self._reading.tools, self._reading.reasoning
        if tools is not None and tools.body == "channels":
            yield from self._channels()
        else:
            dropped: tuple[str, ...] = ()
            if reasoning is not None:
                yield from self._think(reasoning)
                dropped = reasoning.dropped
            if tools is None:
                while (yield from self._source.until(dropped, self._say)) is not None:
                    pass
            else:
                yield from self._speak(tools, dropped)
        if not self._strips["text"]:
            self._emit("text", self._held["text"])

    def _think(self, form: ReasoningFormat) -> Wait[None]:
        source = self._source
        start = source.at
        yield from source.space()
        begins = yield from source.takes(form.begin)
        if begins or self._reading.opened or form.implied:
            yield from source.until((form.end,), lambda text: self._write("reasoning", text))
            self._strips["text"] = True
        else:
            source.at = start

    def _speak(self, form: ToolFormat, dropped: tuple[str, ...]) -> Wait[None]:
        source = self._source
        if form.bare:
            start = source.at
            yield from source.space()
            if (yield from source.sees("{[")):
                yield from self._calls(form, start)
            else:
                source.at = start
        dropped += form.dropped
        while (marker := (yield from source.until(form.begin + dropped, self._say))) is not None:
            if marker in form.begin:
                yield from self._calls(form, source.at - len(marker), marker)

    def _calls(self, form: ToolFormat, start: int, marker: str = "") -> Wait[None]:
        self._mark, num_calls = start, self._num_calls
        try:
            yield from {"json": self._json, "named": self._named, "xml": self._xml, "python": self._python}[form.body](
                form, marker
            )
        except Malformed:
            if self._num_calls > num_calls:
                self.spans[-1] = self.spans[-1][0], max(self.spans[-1][1], self._mark)
            self._say(self._source.text[self._mark : self._source.at])

    def _json(self, form: ToolFormat, marker: str) -> Wait[None]:
        """Reads an object or a list of objects; several may follow one another."""
        source, bare, num_calls = self._source, form.bare and not marker, self._num_calls
        yield from source.space()
        is_list = yield from source.takes("[")
        while True:
            yield from source.space()
            if is_list and (yield from source.takes("]")):
                if self._num_calls == num_calls:
                    raise Malformed
                break
            yield from self._json_call(bare)
            end = source.at
            yield from source.space()
            if (yield from source.sees("," if is_list else ",;")):
                source.at += 1
                yield from source.space()
                if is_list or (yield from source.sees("{")):
                    continue
            elif is_list or (yield from source.sees("{")):
                continue
            source.at = end
            break
        yield from self._end(form)

    def _json_call(self, bare: bool) -> Wait[None]:
        source, found, is_open = self._source, dict[str, Any](), False
        if not (yield from source.takes("{")):
            raise Malformed
        yield from source.space()
        while not (yield from source.takes("}")):
            key = yield from self._json_value('"')
            if key not in _KEYS or key in found or (is_open and key == "parameters"):
                raise Malformed
            yield from source.space()
            if not (yield from source.takes(":")):
                raise Malformed
            yield from source.space()
            if key in ("arguments", "parameters") and "name" in found and (yield from source.sees("{")):
                self._open(found["name"], bare)
                is_open = True
                yield from source.value(self._write_arguments)
                found[key] = None
            else:
                found[key] = yield from self._json_value()
            if key == "name" and (not isinstance(found[key], str) or not self._may_call(found[key], bare)):
                raise Malformed
            yield from source.space()
            if not (yield from source.takes(",")):
                # Models forget the last brace.
                if not (yield from source.sees("}<")):
                    raise Malformed
                yield from source.takes("}")
                break
            yield from source.space()
        if not is_open:
            self._write_call(found, bare)
        self._close()

    def _write_call(self, found: Mapping[str, Any], bare: bool) -> None:
        """Writes a call whose arguments came before its name, or in a text."""
        if "name" not in found:
            raise Malformed
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = _loaded(arguments or "{}")
        if not isinstance(arguments, dict | None):
            raise Malformed
        self._open(found["name"], bare)
        self._write_arguments(json.dumps(arguments or {}, ensure_ascii=False))

    def _json_value(self, first: str = "") -> Generator[None, None, Any]:
        source, pieces = self._source, list[str]()
        if first and not (yield from source.sees(first)):
            raise Malformed
        yield from source.value(pieces.append)
        return _loaded("".join(pieces))

    def _named(self, form: ToolFormat, marker: str) -> Wait[None]:
        source = self._source
        yield from source.space()
        if (yield from source.sees("[{")):
            yield from self._json(form, marker)
            return
        head = yield from source.up_to("{", _MOST_OF_HEAD)
        found = re.fullmatch(form.head, head)
        if found is None:
            raise Malformed
        self._open(next(name for name in found.groups() if name), bare=False)
        yield from source.value(self._write_arguments)
        self._close()
        yield from source.space()
        if not (yield from source.takes("```")):
            source.at = self._mark
        yield from self._end(form)

    def _xml(self, form: ToolFormat, marker: str) -> Wait[None]:
        source, count = self._source, 0
        if marker != "<function=":
            yield from source.space()
            yield from source.must("<function=")
        name = (yield from source.up_to(">", _MOST_OF_HEAD)).strip()
        source.at += 1
        self._open(name, bare=False)
        self._write_arguments("{")
        properties = self._reading.schemas.get(name, {}).get("properties")
        while True:
            yield from source.space()
            if (yield from source.takes("</function>")):
                break
            yield from source.must("<parameter=")
            key = (yield from source.up_to(">", _MOST_OF_HEAD)).strip()
            source.at += 1
            pieces: list[str] = []
            if (yield from source.until(("</parameter>",), pieces.append)) is None:
                raise Malformed
            value = "".join(pieces).removeprefix("\n").removesuffix("\n")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            written = f"{', ' if count else ''}{json.dumps(key, ensure_ascii=False)}: {json_of_text(value, schema)}"
            self._write_arguments(written)
            count += 1
        self._write_arguments("}")
        self._close()
        yield from self._end(form)

    def _python(self, form: ToolFormat, marker: str) -> Wait[None]:
        source, bare = self._source, not marker
        yield from source.space()
        yield from source.must("[")
        while True:
            yield from source.space()
            name = yield from source.word()
            pieces: list[str] = []
            if not self._may_call(name, bare) or not (yield from source.sees("(")):
                raise Malformed
            yield from source.value(pieces.append, python=True)
            arguments = python_arguments("".join(pieces))
            if arguments is None:
                raise Malformed
            self._open(name, bare)
            self._write_arguments(arguments)
            self._close()
            yield from source.space()
            if (yield from source.takes("]")):
                break
            yield from source.must(",")
        yield from self._end(form)

    def _end(self, form: ToolFormat) -> Wait[None]:
        """Skips the marker after a call, and the space before it."""
        source = self._source
        self._mark = source.at
        yield from source.space()
        for marker in form.end:
            if (yield from source.takes(marker)):
                self._mark = source.at
                self.spans[-1] = self.spans[-1][0], source.at
        source.at = self._mark

    def _channels(self) -> Wait[None]:
        source, markers = self._source, (START, CHANNEL, *HARMONY_ENDS)
        yield from source.space()
        # The prompt may end with the marker.
        marker: str | None = "" if (yield from source.takes("to=")) else HARMONY_ENDS[0]
        source.at = 0
        while marker is not None:
            if marker in HARMONY_ENDS:
                marker = yield from source.until(markers, self._say)
                continue
            self._mark = source.at - len(marker)
            try:
                head = marker + (yield from source.up_to(MESSAGE, _MOST_OF_HEAD))
                source.at += len(MESSAGE)
                called, channel = _CALLED.search(head), _CHANNEL_NAME.search(head)
                if called is not None:
                    self._open(called[1], bare=False)
            except Malformed:
                self._say(source.text[self._mark : source.at])
                marker = yield from source.until(markers, self._say)
                continue
            kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
            write = self._write_arguments if called is not None else lambda text, kind=kind: self._write(kind, text)
            marker = yield from source.until(markers, write)
            if called is not None:
                self._close()

    def _may_call(self, name: str, bare: bool) -> bool:
        return (
            0 < len(name) <= _MOST_OF_HEAD
            and bool(self._reading.schemas)
            and (not bare or name in self._reading.schemas)
        )

    def _open(self, name: str, bare: bool) -> None:
        if not self._may_call(name, bare):
            raise Malformed
        start, held = self._mark, self._held["text"]
        if self._source.text.endswith(held, 0, start):
            # White space that the text loses belongs to the call.
            start -= len(held)
        self.spans.append((start, self._mark))
        self._held["text"], self._strips["text"] = "", True
        self._mark = self._source.at
        self._num_calls += 1
        self._emit("name", name, self._num_calls - 1)

    def _write_arguments(self, text: str) -> None:
        self._mark = self._source.at
        self._emit("arguments", text, self._num_calls - 1)

    def _close(self) -> None:
        self._mark = self._source.at
        self.spans[-1] = self.spans[-1][0], self._mark

    def _say(self, text: str) -> None:
        self._write("text", text)

    def _write(self, kind: Literal["text", "reasoning"], text: str) -> None:
        text = self._held[kind] + text
        if self._strips[kind]:
            text = text.lstrip()
        end = max(len(text.rstrip()), len(text) - _MOST_SPACE)
        self._held[kind] = text[end:]
        if end:
            self._strips[kind] = False
            self._emit(kind, text[:end])

    def _emit(self, kind: Literal["text", "reasoning", "name", "arguments"], text: str, call: int = 0) -> None:
        most = self._reading.most_calls
        is_call = kind in ("name", "arguments")
        if not text or (is_call and most is not None and call >= most):
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and kind != "name" and (last.kind, last.call) == (kind, call):
            self._parts[-1] = Part(kind, last.text + text, call)
        else:
            self._parts.append(Part(kind, text, call))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
