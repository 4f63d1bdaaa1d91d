"""What a body means before anything is generated."""

from __future__ import annotations

import pytest

from jattn.llm.serve.errors import RequestError, as_request_error
from jattn.llm.serve.protocol import parse_chat, parse_completion
from torch_core.base.errors import Unsupported

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
MESSAGES = [{"role": "user", "content": "x"}]


def test_the_models_defaults_hold_where_a_body_says_nothing() -> None:
    completion = parse_completion({"prompt": "x", "top_p": None, "temperature": 0}, DEFAULTS).params
    chat = parse_chat({"messages": MESSAGES, "max_completion_tokens": 7}, DEFAULTS).params

    assert (completion.temperature, completion.top_p, completion.max_tokens) == (0, 0.9, 50)
    assert (chat.temperature, chat.top_p, chat.max_tokens) == (0.6, 0.9, 7)


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
