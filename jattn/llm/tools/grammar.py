"""Grammars of answers with calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jattn.llm.tools.formats import GENERIC, ReasoningFormat, ToolFormat

# The spelling that chat templates have.
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

# Keywords that may name or exclude further properties.
_OTHERS = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: its name.
        schema: JSON schema of its arguments; None for a function without arguments.
        strict: refuse a schema with keywords that the grammar does not serve, instead of ignoring them.
    """

    name: str
    schema: Mapping[str, Any] | None = None
    strict: bool = False


def written_format(form: ToolFormat | None, special_tokens: frozenset[str]) -> ToolFormat:
    """Returns the format in which a grammar writes calls: the model's own, if its markers are plain text."""
    if form is None or form.written is None or special_tokens.intersection(form.markers):
        return GENERIC
    return form


def has_trigger(form: ToolFormat) -> bool:
    """Returns whether a grammar can let free text go on to a call, at a marker."""
    return form.written is not None and bool(form.begin) and form.written[0].startswith(form.begin[0])


def calls_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    answer: Mapping[str, Any] | None = None,
    reasoning: ReasoningFormat | None = None,
    opened: bool = False,
) -> str:
    """Returns the grammar of an answer: reasoning, then calls by the tools' schemas.

    Args:
        form: format with `written`.
        tools: tools, one of which each call names.
        required: the answer is calls. Otherwise it may be the `answer` or, without one, text with calls.
        parallel: there may be several calls.
        answer: JSON schema of an answer that is no call.
        reasoning: format of the reasoning that may come first; its markers are plain text.
        opened: the prompt ended within the reasoning.
    """
    before, after = form.written or ("", "")
    is_free = not required and answer is None
    trigger = form.begin[0] if is_free else ""
    calls = [
        f"{_quoted(before.removeprefix(trigger).replace('{name}', json.dumps(each.name, ensure_ascii=False)))} "
        f"%json {_schema(each)} {_quoted(after)}"
        for each in tools
    ]
    rules = {"call": " | ".join(calls)}
    if is_free:
        rules |= {"body": f"(called call){'*' if parallel else '?'} text", "text": "TEXT"}
        rules["called[lazy]"] = f"TEXT {_quoted(trigger)}"
    else:
        several = f" ({_quoted(form.between)} call)*" if parallel else ""
        begin, end = map(_quoted, form.around)
        rules["body"] = f"{begin} call{several} {end}"
    if answer is not None and not required:
        rules["body"] = f"({rules['body']}) | %json {json.dumps(dict(answer))}"
    if reasoning is None:
        rules["start"] = "body"
    else:
        thought = "thought" if opened else f"({_quoted(reasoning.begin)} thought)?"
        rules |= {"start": f"{thought} GAP body", "thought[lazy]": f"TEXT {_quoted(reasoning.end)}"}
    lines = ["%llguidance {}", *(f"{name}: {rule}" for name, rule in rules.items())]
    return "\n".join([*lines, r"TEXT: /(.|\n)*/", r"GAP: /\n{0,2}/", ""])


def _schema(tool: Tool) -> str:
    """Returns the schema of an object: of the properties that it names, and no others, if it says nothing of others."""
    schema = dict(_NO_ARGUMENTS if tool.schema is None else tool.schema)
    if "properties" in schema and not _OTHERS & schema.keys():
        schema["additionalProperties"] = False
    return json.dumps({"type": "object", **schema, "x-guidance": {**_SPELLING, "lenient": not tool.strict}})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
