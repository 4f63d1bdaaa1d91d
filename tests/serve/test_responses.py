"""`/v1/responses` by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from jattn.llm.serve.bodies import read_body
from jattn.llm.serve.errors import RequestError
from jattn.llm.serve.responses_request import ResponsesBody, parse_response
from tests.serve.conftest import MODEL, TEMPLATE
from tests.serve.test_tools import CITY, DAY, check, forced
from torch_core.base.errors import InvalidInput

ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "input": "What is a list?"}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "The weather", "parameters": CITY, "strict": False},
    {"type": "function", "name": "calendar", "parameters": DAY, "strict": True},
]
CALL: dict[str, Any] = ASK | {"tools": TOOLS, "max_output_tokens": 60, "seed": 3, "parallel_tool_calls": False}


class AsCall:
    """A call's item in the form of a chat's call."""

    type = "function"

    def __init__(self, item: Any) -> None:
        self.id, self.function = item.call_id, item


def extra(more: dict[str, Any]) -> dict[str, Any]:
    """Returns a request in which fields that the client does not have come as extra ones."""
    known = {name: each for name, each in more.items() if name != "seed"}
    return {**known, "extra_body": {**known.get("extra_body", {}), "seed": more.get("seed", 0)}}


def test_a_response_has_a_chats_text(client) -> None:
    response = client.responses.create(**ASK)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASK["input"]}], temperature=0, max_tokens=8
    )

    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.id.startswith("resp_")
    assert response.store is False
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8


def test_the_typed_events_of_a_text(client) -> None:
    whole = client.responses.create(**ASK)

    events = list(client.responses.create(stream=True, **ASK))

    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 8


def test_a_loop_of_turns_with_calls(client) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    text = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    turns: list[dict[str, Any]] = [
        {"extra_body": forced(text)},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "calendar"}},
    ]
    for turn in turns:
        response = client.responses.create(**extra(CALL | turn | {"input": items}))
        (call,) = response.output
        check(AsCall(call))
        assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
        items += response.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})

    last = client.responses.create(**extra(ASK | {"input": items, "instructions": "Be brief."}))
    assert last.output_text


def test_the_typed_events_of_a_call(client) -> None:
    asked = extra(CALL | {"tool_choice": "required"})
    (whole,) = client.responses.create(**asked).output

    with client.responses.stream(**asked) as stream:
        events = list(stream)

    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[3:].count("response.function_call_arguments.delta") > 1
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    (item,) = events[-1].response.output
    assert (item.name, item.arguments) == (whole.name, whole.arguments)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == whole.arguments


def test_reasoning_is_an_item_of_its_own(client) -> None:
    asked = ASK | {"extra_body": {"chat_template": TEMPLATE + "<think>{# </think> #}"}}

    (item,) = client.responses.create(**asked).output
    events = list(client.responses.create(stream=True, **asked))

    assert item.type == "reasoning"
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == item.content[0].text == events[-1].response.output[0].content[0].text


def test_a_response_follows_a_schema(client) -> None:
    class Answer(pydantic.BaseModel):
        kind: Literal["list", "tuple"]

    response = client.responses.parse(text_format=Answer, **ASK | {"max_output_tokens": 40})
    with client.responses.stream(text_format=Answer, **ASK | {"max_output_tokens": 40}) as stream:
        streamed = stream.get_final_response()

    assert response.output_parsed == streamed.output_parsed
    assert isinstance(response.output_parsed, Answer)


def test_log_probabilities_are_of_the_text(client) -> None:
    response = client.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, **ASK)

    found = response.output[0].content[0].logprobs
    assert "".join(each.token for each in found) == response.output_text
    assert {len(each.top_logprobs) for each in found} == {2}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"reasoning": {"effort": "huge"}}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"unknown": 1}, "unknown"),
    ],
    ids=str,
)
def test_a_field_that_is_not_served_is_refused_by_name(changes, param) -> None:
    with pytest.raises((InvalidInput, RequestError)) as error:
        parse_response({"input": "x", **changes})

    assert getattr(error.value, "argument", None) == param or getattr(error.value, "param", None) == param


def test_a_prompt_that_is_too_long_is_the_input(client) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**ASK | {"input": "long " * 300})

    assert error.value.param == "input"


def test_what_changes_no_answer_is_accepted() -> None:
    body = read_body(
        ResponsesBody,
        {"input": "x", "store": True, "metadata": {}, "service_tier": "auto", "text": {"verbosity": "low"},
         "include": ["reasoning.encrypted_content"], "previous_response_id": None, "background": False},
    )  # fmt: skip

    assert body.input == "x"


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Rules"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        call,
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": json.dumps([1])},
        {"role": "assistant", "content": "Yes"},
    ]

    generation, _ = parse_response({"input": items, "instructions": "Brief"})

    messages: Any = generation.messages
    assert [each["role"] for each in messages] == ["system", "system", "assistant", "tool", "assistant"]
    assert (messages[2]["reasoning_content"], messages[2]["content"]) == ("Hm", "I look")
    assert [each["id"] for each in messages[2]["tool_calls"]] == ["1", "2"]
    assert messages[3] == {"role": "tool", "tool_call_id": "1", "content": "[1]"}
