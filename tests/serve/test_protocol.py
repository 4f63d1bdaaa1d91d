"""What a body means before anything is generated."""

from __future__ import annotations

import base64
import io
import json
import logging
import random

import numpy as np
import pytest

from jattn.llm.engine import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingMask
from jattn.llm.serve import bodies
from jattn.llm.serve.bodies import UNUSED, DetokenizeBody, EmbeddingsBody, TokenizeBody, read_body
from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.protocol import parse_body, parse_chat, parse_completion
from jattn.llm.serve.responses import Answer, json_bytes
from tests.serve.malformed import drawn
from torch_core.base.errors import ArgumentError, InvalidInput, Unsupported

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
MESSAGES = [{"role": "user", "content": "x"}]


def test_the_models_defaults_hold_where_a_body_says_nothing() -> None:
    completion = parse_completion({"prompt": "x", "top_p": None, "temperature": 0}, DEFAULTS).params
    chat = parse_chat({"messages": MESSAGES, "max_completion_tokens": 7}, DEFAULTS).params

    assert (completion.temperature, completion.top_p, completion.max_tokens) == (0, 0.9, 50)
    assert (chat.temperature, chat.top_p, chat.max_tokens) == (0.6, 0.9, 7)


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_beside_tools_an_answer_has_the_schema_of_its_format(wanted, schema) -> None:
    found = parse_chat({"messages": MESSAGES, "response_format": wanted}).answer_schema

    assert (found and {name: found[name] for name in found if name != "x-guidance"}) == schema


def test_without_defaults_they_are_openais() -> None:
    completion, chat = parse_completion({"prompt": "x"}).params, parse_chat({"messages": MESSAGES}).params

    assert (completion.temperature, completion.top_p, completion.max_tokens) == (1, 1, 16)
    assert chat.max_tokens is None


def test_what_the_model_does_not_serve_is_the_clients_to_leave_out() -> None:
    error = as_request_error(
        Unsupported("prompt_logprobs", "is given", "nothing predicts the prompt"), default="prompt"
    )

    assert (error.status, error.param) == (400, "prompt_logprobs")
    assert as_request_error(RuntimeError("inside")).status == 500


def test_a_salt_of_any_text_separates() -> None:
    salts = [parse_completion({"prompt": "x", "cache_salt": text}).salt for text in ("a", "b", "\u00e9" * 64)]

    assert len(set(salts)) == 3
    assert all(salt is not None and len(salt) == 32 for salt in salts)
    assert parse_completion({"prompt": "x"}).salt is None


def called(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("given", "seen"), [('{"a": 1}', {"a": 1}), ("", {}), ({"a": 1}, {"a": 1})], ids=["text", "empty", "object"]
)
def test_the_arguments_of_a_called_tool_reach_the_template_as_an_object(given, seen) -> None:
    messages = parse_chat({"messages": called(given)}).messages
    assert messages is not None
    (message,) = messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}
    assert message["tool_calls"][0]["id"] == "1"


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        (called("{bad"), "messages[0].tool_calls: arguments is not valid JSON: "),
        (called("[1]"), "messages[0].tool_calls: arguments holds a JSON list; it must be an object."),
        (
            [{"role": "assistant", "tool_calls": "x"}],
            "messages[0].tool_calls is 'x'; it must be a list of objects with a function.",
        ),
    ],
    ids=["no JSON", "no object", "no list"],
)
def test_a_called_tool_that_is_none_is_refused(messages, refusal) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": messages})
    assert str(caught.value).startswith(refusal)
    assert caught.value.param == "messages[0]"


READERS = {
    "completion": lambda more: parse_completion({"prompt": "x", **more}).params,
    "chat": lambda more: parse_chat({"messages": MESSAGES, **more}).params,
    "embeddings": lambda more: read_body(EmbeddingsBody, {"input": "x", **more}),
    "tokenize": lambda more: read_body(TokenizeBody, {"prompt": "x", **more}),
    "detokenize": lambda more: read_body(DetokenizeBody, {"tokens": [1], **more}),
}


@pytest.mark.parametrize("endpoint", READERS)
def test_a_field_that_asks_for_nothing_changes_nothing(endpoint) -> None:
    read = READERS[endpoint]
    for name, values in UNUSED.items():
        for value in ("low",) if values is None else values:
            assert read({name: value}) == read({}), name


@pytest.mark.parametrize("name", [name for name, values in UNUSED.items() if values is not None])
def test_a_field_that_would_change_the_answer_is_refused_by_name(name) -> None:
    with pytest.raises(InvalidInput) as caught:
        READERS["embeddings"]({name: [{"name": "x"}]})

    assert caught.value.argument == name


def test_a_field_that_changes_no_answer_is_logged_once(caplog) -> None:
    bodies._note_unused.cache_clear()
    with caplog.at_level(logging.INFO, logger="jattn.llm.serve"):
        for _ in range(3):
            READERS["chat"]({"verbosity": "low", "store": False})

    assert sorted(record.getMessage() for record in caplog.records) == [
        "clients send store, which changes no answer of this server",
        "clients send verbosity, which changes no answer of this server",
    ]


def test_no_most_likely_tokens_need_no_log_probabilities() -> None:
    assert READERS["chat"]({"top_logprobs": 0}) == READERS["chat"]({})


def test_the_effort_is_a_variable_of_the_template() -> None:
    kwargs = [
        parse_chat({"messages": MESSAGES, "reasoning_effort": "high", "chat_template_kwargs": more}).template
        for more in ({}, {"reasoning_effort": "low"})
    ]

    assert [each["chat_template_kwargs"] for each in kwargs if each] == [
        {"reasoning_effort": "high"},
        {"reasoning_effort": "low"},
    ]


def test_two_thousand_malformed_bodies_are_refused_and_nothing_else_is_raised(seed) -> None:
    choose, num_refused = random.Random(seed), 0
    for _ in range(2000):
        bad = drawn(choose)
        read = parse_chat if bad.path.endswith("chat/completions") else parse_completion
        try:
            read(parse_body(bad.content))
        except (RequestError, ArgumentError):
            num_refused += 1

    # The rest needs the engine to be refused.
    assert num_refused > 1000


@pytest.mark.parametrize("part", [b"[],", b"{},", b'"":0,'])
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(part) -> None:
    with pytest.raises(RequestError, match=r"^the body has more than 262144 lists, objects and fields\.$"):
        parse_body(b'{"a":[' + part * (1 << 18))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"a": [], "b": {}, "c": "é\n", "d": None, "e": [1, 2.5]},
        {"choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": [{}, {"x": [{}]}]}]}}, {}]},
        {"prompt_logprobs": [None, {"1": {"logprob": -1.5}}, {"2": {}}]},
        {"tokens": list(range(40_000))},
    ],
)
def test_an_answer_in_pieces_is_its_json(body) -> None:
    assert json_bytes(body).decode() == json.dumps(body, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_what_a_trainer_replays_is_in_whole_answers_in_vllms_form(chat) -> None:
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    mask = SamplingMask(np.array([[6, 0], [0, 1]], np.uint32))
    completion = CompletionOutput("x", (2, 32), "length", sampling_mask=mask, routed_experts=experts)
    output = RequestOutput("a", None, (7,), (completion,), 0, RequestMetrics(0.0), True)
    asked = {"messages": MESSAGES} if chat else {"prompt": [7]}
    generation = (parse_chat if chat else parse_completion)({**asked, "return_token_ids": True})

    found = Answer(generation, "id", "model", 0).whole([output])

    choice = found["choices"][0]
    assert (choice["sampling_mask"], choice["token_ids"]) == ([[1, 2], [32]], [2, 32])
    np.testing.assert_array_equal(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))), experts)
    assert (found if chat else choice)["prompt_token_ids"] == [7]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_token_that_filters_exclude_has_vllms_smallest_logprob(chat) -> None:
    logprobs = ({2: Logprob(0.0, 1, "a"), 3: Logprob(-np.inf, 2, "b")},)
    completion = CompletionOutput("a", (2,), "length", logprobs=logprobs)
    output = RequestOutput("a", None, (7,), (completion,), 0, RequestMetrics(0.0), True, prompt_logprobs=logprobs)
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} if chat else {"prompt": [7], "logprobs": 2}
    answer = Answer((parse_chat if chat else parse_completion)(asked), "id", "model", 0)

    whole = answer.whole([output])
    parts = answer.parts(0, completion, answer.sample())

    found = whole["choices"][0]["logprobs"]
    top = {each["token"]: each["logprob"] for each in found["content"][0]["top_logprobs"]} if chat else None
    assert (top if chat else found["top_logprobs"][0]) == {"a": 0.0, "b": -9999.0}
    assert parts[0]["choices"][0]["logprobs"] == found
    assert b'"logprob":-9999.0' in json_bytes(whole)


def test_a_number_that_json_lacks_is_no_answer() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"logprob": float("nan")})
