"""Tool loops as OpenAI's clients echo them, in published chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jattn.llm.load import ChatTemplate
from jattn.llm.text.messages import as_messages
from tests.support.chat_templates import PUBLISHED

ARGUMENTS = {"city": "Zürich", "days": [1, 2.5], "unit": None}
SPECIAL: Any = {"bos_token": "<s>", "eos_token": "</s>"}
NOTHING = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning_content": None}


def loop(content: Any, arguments: Any, **nothing: Any) -> list[dict[str, Any]]:
    """Returns a conversation whose fields that say nothing are `nothing`."""
    call = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": content, **nothing, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "content": "no"},
        {"role": "assistant", "content": "No rain.", **nothing},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("arguments", [json.dumps(ARGUMENTS, ensure_ascii=False), ARGUMENTS], ids=["text", "object"])
@pytest.mark.parametrize("tool_calls", [{}, {"tool_calls": None}, {"tool_calls": []}], ids=["none", "null", "empty"])
def test_an_echoed_tool_call_is_what_the_template_prints_of_its_own_form(name, arguments, tool_calls) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    published = PUBLISHED[name]
    echoed = loop(None, arguments, **NOTHING)
    echoed[3] |= tool_calls
    own = loop(published.content, json.dumps(ARGUMENTS, ensure_ascii=False) if published.are_texts else ARGUMENTS)

    text = ChatTemplate(published.source, SPECIAL).render(as_messages(echoed))

    (expected,), _ = render_jinja_template([own], None, None, published.source, add_generation_prompt=True, **SPECIAL)
    assert text == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ m.content }}|{{ m.content ~ 'x' }}|{{ m.content + 'x' }}|{{ 'x' + m.content }}", "|x|x|x"),
        ("{{ m.content is none }} {{ m.content == none }} {{ m.content != none }}", "True True False"),
        ("{{ m.content is not none }} {{ m.content is defined }} {{ 'content' in m }}", "False True True"),
        ("{{ m.content or 'other' }} {{ m.content | length }} {{ m.content | default('x', true) }}", "other 0 x"),
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "missing"])
def test_a_content_that_is_null_is_no_text_and_is_none(source, text, content) -> None:
    (message,) = as_messages([{"role": "assistant", **content}])

    assert ChatTemplate(f"{{% set m = messages[0] %}}{source}").render([message]) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ f.arguments }} {{ f.arguments ~ '' }} {{ '' + f.arguments + '' }}", " ".join(['{"a": "é"}'] * 3)),
        ("{{ f.arguments | tojson }} {{ f | tojson }}", '{"a": "é"} {"name": "f", "arguments": {"a": "é"}}'),
        ("{{ f.arguments is mapping }} {{ f.arguments.a }} {{ f.arguments | items | list }}", "True é [('a', 'é')]"),
    ],
)
def test_arguments_of_a_call_are_an_object_that_prints_as_its_json(source, text) -> None:
    (message,) = as_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "é"}'}}]}]
    )

    template = ChatTemplate(f"{{% set f = messages[0].tool_calls[0].function %}}{source}")

    assert template.render([message]) == text


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_a_call_without_arguments_has_an_empty_object(arguments) -> None:
    (message,) = as_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f", **arguments}}]}])

    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_parts_of_a_content_are_joined_and_a_refusal_is_text() -> None:
    parts = ["a", {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]

    assert as_messages([{"role": "assistant", "content": parts}])[0]["content"] == "a\nb\nc"
