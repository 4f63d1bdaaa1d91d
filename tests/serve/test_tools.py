"""Calls of tools by OpenAI's client: the grammar forces them, so that any model's are valid."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

import openai
import pydantic
import pytest
from starlette.testclient import TestClient

from jattn.llm.engine import SamplingParams
from jattn.llm.serve import tools as tools_of_requests
from jattn.llm.serve.app import create_app
from jattn.llm.serve.config import ServeConfig
from jattn.llm.serve.messages import MessageReader, delta, message_of
from jattn.llm.serve.protocol import parse_chat
from jattn.llm.serve.tools import read_tools, reading_of, with_instruction
from jattn.llm.tools.formats import REASONING_PARSERS, TOOL_PARSERS, tool_format
from jattn.llm.tools.grammar import Tool, calls_grammar
from jattn.llm.tools.parser import Part, Reading
from jattn.llm.workers.grammars import try_grammar
from tests.serve.conftest import MODEL, TEMPLATE
from torch_core.base.errors import InvalidInput

CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
DAY = {"type": "object", "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}}, "required": ["day"],
       "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "calendar", "parameters": DAY, "strict": True}},
]
NAMED: Any = {"type": "function", "function": {"name": "calendar"}}
ASK: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 5, "max_tokens": 60, "parallel_tool_calls": False}
MESSAGES: Any = [{"role": "user", "content": "Rain?"}]
HERMES = TEMPLATE + "{# <tool_call> #}"


def forced(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}}


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments in ({"city": "Bern"}, {"city": "Rome"})
    else:
        assert call.function.name == "calendar"
        assert 1 <= arguments.pop("day") <= 7
        assert not arguments
    assert (call.type, call.id[:5]) == ("function", "call_")


def test_a_loop_of_three_turns_with_two_tools(client) -> None:
    messages = list(MESSAGES)
    text = '[{"name": "weather", "arguments": {"city": "Bern"}}]'
    turns: list[dict[str, Any]] = [
        {"tool_choice": "auto", "extra_body": forced(text)},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
    ]
    names = []
    for turn in turns:
        choice = client.chat.completions.create(messages=messages, tools=TOOLS, **turn, **ASK).choices[0]
        (call,) = choice.message.tool_calls
        check(call)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        names.append(call.function.name)
        messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]

    assert (names[0], names[2]) == ("weather", "calendar")
    last = client.chat.completions.create(
        messages=messages, tools=TOOLS, tool_choice="none", **{**ASK, "max_tokens": 4}
    )
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


@pytest.mark.parametrize("template", [TEMPLATE, HERMES], ids=["generic", "hermes"])
def test_a_stream_has_the_name_first_and_the_arguments_in_pieces(client, template) -> None:
    asked: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **ASK}
    asked["extra_body"] = {"chat_template": template}
    whole = client.chat.completions.create(**asked).choices[0]

    events = list(client.chat.completions.create(stream=True, **asked))

    first, *more = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    assert (first.index, first.type, first.function.name, first.function.arguments) == (
        (0, "function", whole.message.tool_calls[0].function.name, "")
    )
    assert first.id
    assert len(more) > 1
    assert {(each.index, each.id, each.function.name) for each in more} == {(0, None, None)}
    assert "".join(each.function.arguments for each in more) == whole.message.tool_calls[0].function.arguments
    assert "".join(event.choices[0].delta.content or "" for event in events) == ""
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["tool_calls"]


def test_the_clients_parse_reads_calls_and_answers(client) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Bern", "Rome"]

    class Answer(pydantic.BaseModel):
        rain: bool

    tool = openai.pydantic_function_tool(Weather)
    asked: Any = {"messages": MESSAGES, "tools": [tool], "response_format": Answer, **ASK}

    call = client.chat.completions.parse(tool_choice="required", **asked).choices[0].message.tool_calls[0]
    either = client.chat.completions.parse(**asked).choices[0].message
    answer = client.chat.completions.parse(tool_choice="none", **asked).choices[0].message

    assert isinstance(call.function.parsed_arguments, Weather)
    assert isinstance(either.parsed, Answer) or isinstance(either.tool_calls[0].function.parsed_arguments, Weather)
    assert isinstance(answer.parsed, Answer)


def test_reasoning_is_apart_from_the_text(client) -> None:
    template = TEMPLATE + "<think>\n{# </think> #}"
    asked: Any = {"messages": MESSAGES, "model": MODEL, "temperature": 0, "max_tokens": 4}

    answers = [
        client.chat.completions.create(extra_body={"chat_template": template, **more}, **asked).choices[0].message
        for more in ({}, {"include_reasoning": False})
    ]
    events = list(client.chat.completions.create(stream=True, extra_body={"chat_template": template}, **asked))

    assert [answer.content for answer in answers] == [None, None]
    assert answers[0].model_extra["reasoning_content"]
    assert "reasoning_content" not in answers[1].model_extra
    pieces = [(event.choices[0].delta.model_extra or {}).get("reasoning_content") or "" for event in events]
    assert "".join(pieces) == answers[0].model_extra["reasoning_content"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS[:1]}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(changes, param) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_chat({"messages": MESSAGES, **changes})

    assert error.value.argument == param


def test_a_schema_that_no_grammar_serves_is_refused_as_tools(client) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "wat"}}}}}

    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(messages=MESSAGES, tools=[tool], tool_choice="required", **ASK)

    assert error.value.param == "tools"


def grammar(name: str, **options: Any) -> str:
    form = tool_format(name, "")
    assert form is not None
    return calls_grammar(form, [Tool("f", CITY), Tool("g")], **{"required": True, "parallel": True, **options})


CALL = '{"name": "f", "arguments": {"city": "Bern"}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (grammar("hermes"), [TAGGED, f"{TAGGED}\n{TAGGED}"], ["Hello", "<tool_call>\n{}", ""]),
        (grammar("hermes", parallel=False), [TAGGED], [f"{TAGGED}\n{TAGGED}"]),
        (grammar("hermes", required=False), ["Hello <tool", f"Hello\n{TAGGED} a", ""], ["Hello <tool_call>a"]),
        (grammar("hermes", required=False, answer=DAY), ['{"day":5}', TAGGED], ["Hello"]),
        (grammar("json"), [f"[{CALL}]", f'[{CALL}, {{"name": "g", "arguments": {{}}}}]'], ["[]", CALL]),
        (grammar("llama3_json"), ['{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}'], [CALL]),
    ],
)
def test_a_grammar_takes_calls_by_their_schemas(source, good, bad) -> None:
    llguidance = pytest.importorskip("llguidance")
    try_grammar("grammar", source, True)
    for text, is_good in [*((text, True) for text in good), *((text, False) for text in bad)]:
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(source), log_level=0
        )
        taken = matcher.validate_tokens(list(text.encode())) == len(text.encode())
        assert (taken and matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) is is_good, text


def test_arguments_are_those_that_a_schema_names() -> None:
    form = tool_format("json", "")
    assert form is not None
    city = {"properties": {"city": {"type": "string"}}}
    closed, opened = (
        calls_grammar(form, [Tool("f", {**city, **more})], required=True, parallel=True)
        for more in ({}, {"additionalProperties": True})
    )

    assert '"additionalProperties": false' in closed
    assert '"additionalProperties": false' not in opened


def test_reasoning_comes_before_a_call_that_is_required(server) -> None:
    tokenizer, use = server.llm.llm.tokenizer, read_tools(TOOLS, "required", parallel=True)
    sources = []
    for prompt in ("<think>\n", "assistant:"):
        reading, params = reading_of(
            use,
            SamplingParams(),
            parsers=("hermes", "qwen3"),
            template="",
            prompt=prompt,
            tokenizer=tokenizer,
            answer=None,
        )
        assert reading is not None
        assert reading.opened is (prompt == "<think>\n")
        assert params.structured_outputs is not None
        sources.append(params.structured_outputs.grammar)

    assert "start: thought GAP body" in sources[0]
    assert 'start: ("<think>" thought)? GAP body' in sources[1]


@pytest.mark.parametrize(("parser", "installed", "has_grammar"), [("hermes", True, True), ("hermes", False, False),
                                                                  ("mistral", True, False)])  # fmt: skip
def test_strict_arguments_have_a_grammar_where_the_format_has_a_trigger(
    server, monkeypatch, parser, installed, has_grammar
) -> None:
    monkeypatch.setattr(tools_of_requests.importlib.util, "find_spec", lambda _: object() if installed else None)
    reading, params = reading_of(
        read_tools(TOOLS, "auto", parallel=True),
        SamplingParams(),
        parsers=(parser, "none"),
        template="",
        prompt="",
        tokenizer=server.llm.llm.tokenizer,
        answer=None,
    )

    assert reading is not None
    assert (params.structured_outputs is not None) is has_grammar


def test_a_call_with_malformed_arguments_is_text_and_one_that_was_cut_is_not() -> None:
    reading = Reading(tools=tool_format("hermes", ""), schemas={"f": {}})
    text = 'A <tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'
    cut = '<tool_call>{"name": "f", "arguments": {"a": "b'

    malformed, partial = message_of(reading, text, cut=False), message_of(reading, cut, cut=True)

    assert (malformed.text, malformed.calls) == (text, [])
    assert [call.arguments for call in partial.calls] == ['{"a": "b']


def test_an_id_has_the_length_that_a_template_takes() -> None:
    reading = Reading(tools=tool_format("mistral", ""), schemas={"f": {}})

    (call,) = message_of(reading, "[TOOL_CALLS]f{}", cut=False).calls
    streamed = delta(MessageReader(reading).read("[TOOL_CALLS]f{}", finished=True)[0], reading)

    assert len(call.call_id) == len(streamed["tool_calls"][0]["id"]) == 9
    assert call.call_id.isalnum()


def test_a_silent_template_is_logged_and_an_instruction_takes_its_place(server, caplog) -> None:
    silent = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    body = {"messages": MESSAGES, "tools": TOOLS}
    texts = []
    tools_of_requests.note_silent_template.cache_clear()
    for is_told in (False, False, True):
        # The server's own life is not this application's.
        config = ServeConfig(model_name=MODEL, chat_template=silent, tool_instruction=is_told)
        asked = TestClient(create_app(server.llm, config))
        with caplog.at_level(logging.WARNING, logger="jattn.llm.serve"):
            tokens = asked.post("/tokenize", json=body).json()["tokens"]
        texts.append(server.llm.llm.tokenizer.decode(tokens))

    assert len([each for each in caplog.records if each.name == "jattn.llm.serve"]) == 1
    assert texts[0] == texts[1] == "user: Rain?\n"
    assert texts[2].startswith("system: You can call functions.")
    assert '"name": "weather"' in texts[2]


def test_an_instruction_follows_the_systems_message() -> None:
    first, *_ = with_instruction([{"role": "system", "content": "Be brief."}, *MESSAGES], TOOLS)

    assert first["content"].startswith("Be brief.\n\nYou can call functions.")


@pytest.mark.parametrize(("choice", "stays"), [("auto", True), ("required", False)])
def test_special_tokens_stay_in_a_text_where_they_are_markers(server, monkeypatch, choice, stays) -> None:
    marked = frozenset({"[TOOL_CALLS]", "[THINK]"})
    monkeypatch.setattr(tools_of_requests, "_special_tokens", lambda _: marked)
    reading, params = reading_of(
        read_tools(TOOLS, choice, parallel=True),
        SamplingParams(),
        parsers=("mistral", "mistral"),
        template="",
        prompt="[THINK]",
        tokenizer=server.llm.llm.tokenizer,
        answer=None,
    )

    # A grammar cannot spell them: a required call is a JSON list, and at once.
    assert reading is not None
    assert reading.tools is not None
    assert (params.skip_special_tokens, reading.opened, reading.tools.name == "mistral") == (not stays, stays, stays)


def test_a_stream_without_formats_is_its_text() -> None:
    assert MessageReader(None).read("a", finished=False) == [Part("text", "a")]
    assert {"auto", "none"} < {*TOOL_PARSERS} & {*REASONING_PARSERS}
