"""Texts of real families as calls, text and reasoning, in pieces of any size."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.llm.tools.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from jattn.llm.tools.parser import AnswerParser, Part, Reading

TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": ["string", "null"]}, "tags": {}}
SCHEMAS: dict[str, Any] = {"weather": {"type": "object", "properties": TYPES}, "now": {"type": "object"}}
CITY = {"city": 'Köln "}]', "days": 2}
BOTH = [("weather", CITY), ("now", {})]


def deepseek(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in names)


CALLS, CALL, SEP, CALL_END, CALLS_END = deepseek("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
JSON = json.dumps(CITY, ensure_ascii=False)
#: Format, text, the text and the reasoning that remain, the calls.
RECORDED: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        (f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'),
        "I look.",
        "",
        BOTH,
    ),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON)}}}', "", "", BOTH[:1]),
    ("hermes", '<tool_call> [ { "arguments" : {} , "name" : "now" } ] </tool_call>', "", "", BOTH[1:]),
    ("llama3_json", json.dumps({"name": "weather", "parameters": CITY}, indent=2), "", "", BOTH[:1]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {JSON}</tool_call> Done', "Done", "", BOTH[:1]),
    (
        "qwen3_coder",
        ("<tool_call>\n<function=weather>\n<parameter=city>\nKöln \"}]\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>"),
        "",
        "",
        BOTH,
    ),
    (
        "qwen3_coder",
        ("<tool_call><function=weather><parameter=city>\na\n\nb</parameter><parameter=zip>None</parameter>"
        "<parameter=days>many</parameter><parameter=tags>5</parameter></function></tool_call>"),
        "",
        "",
        [("weather", {"city": "a\n\nb", "zip": None, "days": "many", "tags": "5"})],
    ),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {JSON}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        "",
        "",
        BOTH,
    ),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}', "", "", BOTH[:1]),
    ("llama3_json", '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', "", []),
    ("pythonic", "[weather(city='Köln \"}]', days=2), now()]", "", "", BOTH),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", "", BOTH[1:]),
    (
        "pythonic",
        "[weather(city=None, days=-1, tags=[True, {'a': (1.5, false)}])]",
        "",
        "",
        [("weather", {"city": None, "days": -1, "tags": [True, {"a": [1.5, False]}]})],
    ),
    ("pythonic", "[now](https://example.com)", "[now](https://example.com)", "", []),
    ("pythonic", "[weather('x')]", "[weather('x')]", "", []),
    (
        "mistral",
        (f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}}]'),
        "",
        "",
        BOTH,
    ),
    ("mistral", f"Yes.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now{{}}", "Yes.", "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{JSON}", "", "", BOTH[:1]),
    (
        "granite",
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        "",
        BOTH,
    ),
    (
        "deepseek_v3",
        (f"Hm.{CALLS}{CALL}function{SEP}weather\n```json\n{JSON}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}"),
        "Hm.",
        "",
        BOTH,
    ),
    (
        "deepseek_v3",
        f"{CALLS}{CALL}weather{SEP}{JSON}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}",
        "",
        "",
        BOTH,
    ),
    (
        "openai",
        ("<|channel|>analysis<|message|>I need <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}"
        "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"),
        "I look.",
        "I need <b>.",
        BOTH,
    ),
    ("openai", "<|channel|>final<|message|>Hello.\n", "Hello.\n", "", []),
    ("openai", " to=functions.now<|channel|>commentary<|message|>{}<|call|>", "", "", BOTH[1:]),
    (
        "phi4_mini_json",
        f'functools[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        "",
        BOTH,
    ),
    ("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", "", BOTH[1:]),
    ("json", f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "parameters": null}}]', "", "", BOTH),
]  # fmt: skip


def reading(name: str, reasoning: str = "none", **options: Any) -> Reading:
    return Reading(tools=tool_format(name, ""), reasoning=reasoning_format(reasoning, ""), schemas=SCHEMAS, **options)


def parts_of(form: Reading, *pieces: str) -> list[Part]:
    """Returns the parts with equal neighbours joined."""
    parser, found = AnswerParser(form), list[Part]()
    for piece in pieces:
        found += parser.feed(piece)
    found += parser.feed("", finished=True)
    groups = itertools.groupby(found, lambda part: (part.kind, part.call, part.text if part.kind == "name" else ""))
    return [Part(kind, name or "".join(part.text for part in group), call) for (kind, call, name), group in groups]


def joined(parts: list[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part for part in parts if part.kind == "name"]
    assert [part.call for part in names] == list(range(len(names)))
    texts = [
        "".join(part.text for part in parts if (part.kind, part.call) == ("arguments", i)) for i in range(len(names))
    ]
    return [(name.text, json.loads(text)) for name, text in zip(names, texts, strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), RECORDED)
def test_a_familys_text_is_its_calls(name, text, content, reasoning, calls) -> None:
    for pieces in ([text], list(text)):
        parts = parts_of(reading(name), *pieces)

        assert calls_of(parts) == calls
        assert (joined(parts, "text"), joined(parts, "reasoning")) == (content, reasoning)


def test_every_format_has_a_recorded_text() -> None:
    assert {name for name, *_ in RECORDED} == {each.name for each in TOOL_FORMATS}


FRAGMENTS = st.sampled_from(
    [
        *sorted({marker for each in TOOL_FORMATS for marker in each.markers}),
        *sorted({marker for each in REASONING_FORMATS for marker in each.markers}),
        *('{"name": "now"', '"weather"', '"arguments": ', '"parameters":', "{}", "}", "[", "]", ", ", "; ", ": ", '"'),
        *(
            "now",
            "weather",
            "(",
            ")",
            "city=",
            "'a'",
            " ",
            "\n\n",
            "x",
            "<",
            "<|",
            "\\",
            "<parameter=city>",
            "1",
            "```",
        ),
        *("</parameter>", "</function>", ">", "function", " to=functions.now", "analysis", "commentary", "json"),
        *(text for _, text, *_ in RECORDED),
    ]
)


@settings(max_examples=200, deadline=None, database=None)
@given(
    name=st.sampled_from([each.name for each in TOOL_FORMATS] + ["none"]),
    reasoning=st.sampled_from([each.name for each in REASONING_FORMATS] + ["none"]),
    opened=st.booleans(),
    text=st.lists(FRAGMENTS, max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_the_pieces_of_a_stream_do_not_change_the_answer(name, reasoning, opened, text, cuts) -> None:
    form = reading(name, reasoning, opened=opened)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = parts_of(form, text)

    assert parts_of(form, *(text[a:b] for a, b in itertools.pairwise(places))) == whole
    assert parts_of(form, *text) == whole


@settings(max_examples=60, deadline=None, database=None)
@given(name=st.sampled_from([each.name for each in TOOL_FORMATS]), text=st.text("abc <>{}[]|\n\"'=:,", max_size=60))
def test_a_text_without_a_call_is_itself(name, text) -> None:
    parts = parts_of(reading(name), *text)

    assert parts == ([Part("text", text)] if text else [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather"',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"nom": "weather"}</tool_call>',
        '<tool_call>\n{"name": "now", "name": "weather", "arguments": {}}</tool_call>',
        "<tool_call>weather</tool_call>",
        "<tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}',
        '<tool_call>{"name": "now", "arguments": "{"}',
        '<tool_call>{"name": "", "arguments": {}}',
        "<tool_call>[]",
    ],
)
def test_a_malformed_call_is_text(text) -> None:
    assert parts_of(reading("hermes"), text) == [Part("text", text)]


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(reading("hermes"))
    feed = [*'<tool_call>{"name": "weather", "arguments": {"city": "K', *'öln"}', "}</tool_call>"]

    parts = [parser.feed(piece) for piece in feed]

    assert [part for piece in parts for part in piece][:2] == [Part("name", "weather"), Part("arguments", "{")]
    assert parts[-2:] == [[Part("arguments", "}")], []]
    assert sum(map(len, parts)) == 1 + len('{"city": "Köln"}')


@pytest.mark.parametrize(
    ("name", "pieces", "heard"),
    [
        ("hermes", ["a <tool", "s"], ["a", " <tools"]),
        ("hermes", ["1 < 2", " <b"], ["1 < 2", " <b"]),
        ("llama3_json", ['{"answer": ', "1}"], ['{"answer":', " 1}"]),
        ("pythonic", ["[1", ", 2]"], ["[1", ", 2]"]),
        ("json", ['{"name": "Anna", ', "1"], ['{"name": "Anna",', " 1"]),
    ],
)
def test_the_start_of_a_marker_is_held_back_no_longer_than_it_is_one(name, pieces, heard) -> None:
    parser = AnswerParser(reading(name))

    assert [joined(parser.feed(piece), "text") for piece in pieces] == heard


def test_reasoning_is_what_stands_between_its_markers() -> None:
    text = "<think>\nI wonder.\n</think>\n\nHello <think>"

    assert parts_of(reading("none", "qwen3"), *text) == [Part("reasoning", "I wonder."), Part("text", "Hello <think>")]
    assert parts_of(reading("none", "qwen3", opened=True), "I wonder.</think>Hello") == [
        Part("reasoning", "I wonder."),
        Part("text", "Hello"),
    ]
    assert parts_of(reading("none", "qwen3"), "Hello</think>") == [Part("text", "Hello</think>")]
    assert parts_of(reading("none", "deepseek_r1"), "I wonder") == [Part("reasoning", "I wonder")]
    assert parts_of(reading("none", "granite_response"), "<think>a</think><response>b</response>") == [
        Part("reasoning", "a"),
        Part("text", "b"),
    ]


def test_calls_beyond_the_wanted_number_are_left_out() -> None:
    _, text, *_ = RECORDED[0]

    assert calls_of(parts_of(reading("hermes", most_calls=1), text)) == BOTH[:1]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("'<tool_call>\\n<function=' + name", "qwen3_coder"),
        ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_of_role|>... respond with <|tool_call|> followed by", "granite"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
        (CALL, "deepseek_v3"),
        ("<|start|>assistant<|channel|>final", "openai"),
        ("{{ tools }}", "json"),
    ],
)
def test_a_template_shows_its_format(template, name) -> None:
    assert getattr(tool_format("auto", template), "name", None) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think></think><response></response>", "granite_response"),
        ("{{ '<think>' }}", "qwen3"),
        ("[THINK]", "mistral"),
        ("write 'Here is my thought process:' first", "granite"),
        ("<seed:think>", "seed_oss"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_how_its_model_reasons(template, name) -> None:
    assert getattr(reasoning_format("auto", template), "name", None) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[weather(city=" + "[" * 20_000),
        ("pythonic", "[weather(city=" + "-" * 20_000 + "1)]"),
        ("hermes", '<tool_call>{"id": ' + "[" * 20_000),
        ("hermes", "<tool_call>" * 2_000),
        ("mistral", "[TOOL_CALLS]" * 2_000),
        ("openai", "<|channel|>" * 2_000),
        ("json", " " * 20_000 + "x"),
    ],
    ids=lambda each: each[:30],
)
def test_a_hostile_text_is_text(name, text) -> None:
    parts = parts_of(reading(name), *(text[place : place + 64] for place in range(0, len(text), 64)))

    assert parts == [Part("text", text)]
