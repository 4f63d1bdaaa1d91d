"""`/v1/messages`, by raw HTTP and by Anthropic's client where it is installed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from jattn.llm.serve.anthropic_request import parse_messages
from jattn.llm.serve.errors import RequestError
from tests.serve.conftest import KEY, MODEL, TEMPLATE
from tests.serve.test_tools import CITY, DAY, forced
from torch_core.base.errors import InvalidInput

USER: Any = {"role": "user", "content": "What is a list?"}
ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8, "messages": [USER]}
TOOLS: Any = [
    {"name": "weather", "description": "The weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "calendar", "input_schema": DAY},
]
ANY = {"type": "any", "disable_parallel_tool_use": True}
CALL: dict[str, Any] = ASK | {"tools": TOOLS, "max_tokens": 60, "seed": 3, "temperature": 1}
CALLED: Any = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bern"}}

RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1"}


@pytest.fixture(scope="module")
def post(server) -> Any:
    with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=600) as http:
        yield lambda body, path="/v1/messages": http.post(path, json=body)


def events_of(post, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream, each of which has its type as its name."""
    found = []
    for each in post(body | {"stream": True}).text.split("\n\n")[:-1]:
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_has_a_chats_text(client, post) -> None:
    message = post(ASK).json()
    chat = client.chat.completions.create(model=MODEL, messages=[USER], temperature=0, max_tokens=8)

    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["id"].startswith("msg_")
    counts = message["usage"]
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] == chat.usage.prompt_tokens
    assert counts["output_tokens"] == 8


def test_the_events_of_a_message_come_in_anthropics_order(post) -> None:
    whole = post(ASK).json()

    events = events_of(post, ASK)

    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    deltas = ["content_block_delta"] * num_deltas
    start, stop = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == [*start, *deltas, *stop]
    text = "".join(event["delta"]["text"] for event in events[2 : 2 + num_deltas])
    assert [{"type": "text", "text": text}] == whole["content"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


def test_a_stop_sequence_is_named(post) -> None:
    text = post(ASK).json()["content"][0]["text"]

    message = post(ASK | {"stop_sequences": ["not there", text[3:6]]}).json()

    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[3:6])
    assert message["content"][0]["text"] == text[: text.index(text[3:6])]


def test_a_loop_of_turns_with_tools(post) -> None:
    messages = [USER]
    text = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    turns: list[dict[str, Any]] = [
        forced(text),
        {"tool_choice": ANY},
        {"tool_choice": {"type": "tool", "name": "calendar"}},
    ]
    for turn in turns:
        message = post(CALL | turn | {"messages": messages}).json()
        (block,) = message["content"]
        assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
        assert block["input"].keys() == {"city" if block["name"] == "weather" else "day"}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "5"}]}
        messages = [*messages, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]

    last = post(ASK | {"messages": messages, "tools": TOOLS, "tool_choice": {"type": "none"}, "system": "Be brief."})
    assert last.json()["content"][0]["text"]


def test_the_input_of_a_tool_is_streamed_in_pieces(post) -> None:
    asked = CALL | {"tool_choice": ANY}
    (whole,) = post(asked).json()["content"]

    _, start, *more = events_of(post, asked)

    assert start["content_block"] | {"id": whole["id"]} == whole | {"input": {}}
    pieces = [event["delta"]["partial_json"] for event in more if event["type"] == "content_block_delta"]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == whole["input"]
    assert more[-2]["delta"]["stop_reason"] == "tool_use"


def test_reasoning_is_a_block_unless_thinking_is_off(post) -> None:
    asked = ASK | {"chat_template": TEMPLATE + "<think>{# </think> #}"}

    (block,) = post(asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}}).json()["content"]
    events = events_of(post, asked)
    without = post(asked | {"thinking": {"type": "disabled"}}).json()

    assert block["type"] == "thinking"
    pieces = [event["delta"]["thinking"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == block["thinking"]
    assert without["content"] == []


def test_a_message_follows_a_schema(post) -> None:
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}

    message = post(ASK | {"max_tokens": 40, "output_config": {"format": form}}).json()

    assert json.loads(message["content"][0]["text"])["rain"] in (True, False)


def test_tokens_are_counted_without_an_answer(client, post) -> None:
    body = {"model": MODEL, "messages": [USER]}

    counted = post(body, "/v1/messages/count_tokens").json()

    chat = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=1)
    assert counted == {"input_tokens": chat.usage.prompt_tokens}


def test_errors_have_anthropics_form(server, post) -> None:
    long = post(ASK | {"messages": [{"role": "user", "content": "long " * 300}]})
    unknown = post(ASK | {"model": "other"})
    no_key = httpx.post(f"{server.url}/v1/messages", json=ASK)

    kinds = ["invalid_request_error", "not_found_error", "authentication_error"]
    assert [each.json()["error"]["type"] for each in (long, unknown, no_key)] == kinds
    assert [each.status_code for each in (long, unknown, no_key)] == [400, 404, 401]
    assert "messages" in long.json()["error"]["message"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [*blocks]}, USER]}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "A list is"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "tool_result", "content": "5"}), "messages[0].content[0].tool_use_id"),
        (user(RESULT | {"content": [{"type": "image"}]}), "messages[0].content[0].content"),
        (assistant({"type": "tool_use", "id": "1", "name": "f", "input": "{}"}), "messages[0].content[0].input"),
        (assistant({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"unknown": 1}, "unknown"),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_not_served_is_refused_by_name(changes, param) -> None:
    with pytest.raises((InvalidInput, RequestError)) as error:
        parse_messages({"max_tokens": 5, "messages": [USER], **changes})

    assert getattr(error.value, "argument", None) == param or getattr(error.value, "param", None) == param


def test_blocks_become_messages() -> None:
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": each, "content": each, "is_error": True} for each in "12"
    ]
    thought, text = {"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "I look"}
    body = {
        "system": [{"type": "text", "text": "Brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": [thought, text, CALLED, CALLED | {"id": "2"}]},
            {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
        ],
        "max_tokens": 5, "metadata": {"user_id": "x"}, "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip

    messages: Any = parse_messages(body).messages

    assert [each["role"] for each in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert (messages[1]["content"], messages[5]["content"]) == ("One\nTwo", "So?")
    assert (messages[2]["reasoning_content"], messages[2]["content"]) == ("Hm", "I look")
    assert [each["id"] for each in messages[2]["tool_calls"]] == ["1", "2"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert messages[4] == {"role": "tool", "tool_call_id": "2", "content": "2"}


def test_anthropics_client(server) -> None:
    library = pytest.importorskip("anthropic")
    # It has no other parameters of sampling.
    ask = {name: ASK[name] for name in ("model", "max_tokens", "messages")}
    with library.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=600) as client:
        message = client.messages.create(**ask)
        with client.messages.stream(tool_choice=ANY, **ask | {"tools": TOOLS, "max_tokens": 60}) as stream:
            called = stream.get_final_message()
        with pytest.raises(library.BadRequestError) as error:
            client.messages.create(**ask | {"max_tokens": 0})

    assert message.content[0].text
    assert called.stop_reason == "tool_use"
    assert called.content[0].input
    assert called.usage.output_tokens > 0
    assert "max_tokens" in str(error.value)
