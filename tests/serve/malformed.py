"""Requests that must be refused: some by hand, and any number drawn from what each field may hold."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

#: Bodies of /v1/completions, and the field that the answer must name.
BAD_COMPLETIONS: list[tuple[Any, str | None]] = [
    (b"{", None),
    (b"[1]", None),
    (b"\xff", None),
    (b'{"prompt": "x", "prompt": "y"}', None),
    (b'{"prompt": "x", "temperature": NaN}', None),
    (b"[" * 50_000, None),
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x", "model": 5}, "model"),
    ({"prompt": "x", "model": "other"}, "model"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": "two"}, "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "temperature": 1e999}, None),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "seed": "x"}, "seed"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": 5}, "stream_options"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "logprobs": -1, "echo": True}, "logprobs"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 1, "05": -1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "x", "echo": True, "stream": True}, "echo"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "vllm_xargs": {"adapter": 1}}, "vllm_xargs"),
    ({"prompt": "x", "vllm_xargs": 3}, "vllm_xargs"),
    ({"prompt": "x", "return_token_ids": True, "stream": True}, "return_token_ids"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "x", "bad_words": "x"}, "bad_words"),
    ({"prompt": "x", "bad_words": ["seed " * 299]}, "bad_words"),
    ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regexp": "x"}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "(["}}, "structured_outputs"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "x", "unknown_field": 1}, "unknown_field"),
    ({"prompt": "x", "\ud800": 1}, "\ud800"),
]
#: The same of /v1/chat/completions.
BAD_CHATS: list[tuple[Any, str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": "x"}], "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": [{"role": "user", "content": "x"}], "audio": {"voice": "x"}}, "audio"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 10**6}, "max_completion_tokens"),
    *(
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: "x"}}, "chat_template_kwargs")
        for name in ("messages", "tools", "add_generation_prompt", "chat_template")
    ),
]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that must be refused.

    Attributes:
        path: of the endpoint.
        content: the body.
        param: the field that the answer names; None where none is wrong.
        status: of the answer; None for any of 400 to 499.
        key: that the client brings; None for the right one.
    """

    path: str
    content: bytes
    param: str | None
    status: int | None = None
    key: str | None = None


_PATHS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
_NOT_TEXT: list[Any] = [5, 0.5, True, [], {}]
_NOT_A_NUMBER: list[Any] = ["x", "1", True, [], {}]
_NOT_A_FLAG: list[Any] = ["true", 1, 0.0, [], {}]
_NOT_AN_OBJECT: list[Any] = ["x", 5, True, [], [1]]
_NOT_STRINGS: list[Any] = [5, True, False, {}, {"a": 1}, [5], [""], ["x"] * 200]
_NOT_TOKENS: list[Any] = ["", "x", 5, False, {}, ["x"], [-1], [1.5], [True], [99_999], [1 << 40]]
_NOT_WHOLE: list[Any] = [*_NOT_A_NUMBER, 1.5, 1 << 70, -(1 << 70)]
_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
_SCHEMAS: list[Any] = [
    {"type": "wat"},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"$ref": "https://example.com/schema"},
    {"$ref": "#/nowhere"},
    {"type": "array", "uniqueItems": True},
    {"type": "string", "pattern": "(["},
    {"type": 5},
    {"properties": 5},
]
#: Of both endpoints: what a field must not hold.
_WRONG: dict[str, list[Any]] = {
    "model": [*_NOT_TEXT, "other", "", "x" * 5000, "\ud800"],
    "n": [*_NOT_WHOLE, 0, -1, 1025, 1000],
    "temperature": [*_NOT_A_NUMBER, -0.1, 1e39, 10**400],
    "top_p": [*_NOT_A_NUMBER, 0, -1, 1.001],
    "top_k": [*_NOT_WHOLE, -2, 1 << 30],
    "min_p": [*_NOT_A_NUMBER, -0.1, 1.1],
    "presence_penalty": [*_NOT_A_NUMBER, 2.1, -2.1],
    "frequency_penalty": [*_NOT_A_NUMBER, 2.1, -2.1],
    "repetition_penalty": [*_NOT_A_NUMBER, 0, -1, 1e39],
    "max_tokens": [*_NOT_WHOLE, 0, -1],
    "min_tokens": [*_NOT_WHOLE, -1],
    "seed": [*_NOT_A_NUMBER, 1.5],
    "stop": [5, True, {}, {"a": 1}, [5], [""], "", ["x"] * 17],
    "stop_token_ids": [*_NOT_TOKENS, [1] * 129],
    "include_stop_str_in_output": _NOT_A_FLAG,
    "ignore_eos": _NOT_A_FLAG,
    "skip_special_tokens": _NOT_A_FLAG,
    "stream": _NOT_A_FLAG,
    "prompt_logprobs": [*_NOT_WHOLE, -2, 21],
    "logit_bias": [*_NOT_AN_OBJECT, {"x": 1}, {"-1": 1}, {"1": "x"}, {"9999": 1}, {"1": 1e39}, {"1": True}],
    "allowed_token_ids": [*_NOT_TOKENS, []],
    "bad_words": _NOT_STRINGS,
    "truncate_prompt_tokens": [*_NOT_WHOLE, 0, -2],
    "logits_processors": [*_NOT_AN_OBJECT, {"nobody": 1}],
    "structured_outputs": [
        *_NOT_AN_OBJECT,
        {},
        {"regex": 5},
        {"regex": "(["},
        {"choice": []},
        {"choice": "x"},
        {"choice": ["a"], "regex": "a"},
        {"grammar": "start: a"},
        {"json": "{"},
        {"nothing": 1},
        {"json_object": "x"},
        {"regex": "a" * 200_000},
        *({"json": schema} for schema in _SCHEMAS),
    ],
    "response_format": [
        *_NOT_AN_OBJECT,
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 5}},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in _SCHEMAS),
    ],
    "stream_options": [*_NOT_AN_OBJECT, {"include_usage": True}],
    "cache_salt": [*_NOT_TEXT, "", "x" * 65],
    "priority": [*_NOT_WHOLE, 1 << 21],
    "functions": ["x", 5, {}, [{"name": "f"}]],
    "length_penalty": [*_NOT_A_NUMBER, 1.5],
    "web_search_options": [{}],
    "temprature": [1],
}
_WRONG_BY_PATH: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [5, True, {}, [], [[]], ["x", 5], [1.5], [-1], [99_999], "", "x" * 4000, ["x"] * 257, [1] * 256],
        "logprobs": [*_NOT_WHOLE, -1, 21],
        "best_of": [*_NOT_WHOLE, 0, -1],
        "echo": _NOT_A_FLAG,
        "suffix": ["x", 5],
        "messages": [[]],
    },
    "/v1/chat/completions": {
        "messages": [5, "x", {}, [], [{"role": "user", "content": "x" * 4000}]],
        "max_completion_tokens": _NOT_WHOLE,
        "logprobs": ["true", 1, [], {}],
        "top_logprobs": [*_NOT_WHOLE, -1, 21, 2],
        "tools": ["x", 5, {}, [5], ["x"]],
        "tool_choice": ["required", "any", 5, {}, {"type": "function"}],
        "chat_template_kwargs": _NOT_AN_OBJECT,
        "chat_template": [
            *_NOT_TEXT,
            _LOOP,
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{% for %}",
            "{{ raise_exception('no') }}",
            "{{ 'x' * 99999999 }}",
            "{% include 'file' %}",
            "{{ 1 / 0 }}",
            "x" * 140_000,
        ],
        "add_generation_prompt": _NOT_A_FLAG,
        "prompt": ["x"],
    },
}
_BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b"\xff\xfe",
    b'{"prompt": "x", "prompt": "y"}',
    b'{"a": NaN}',
    b"[" * 50_000,
]


def drawn(choose: random.Random) -> Malformed:
    """Returns one of them: a wrong value, a broken or oversized body, or a wrong key."""
    path = choose.choice(list(_PATHS))
    kind = choose.random()
    if kind < 0.05:
        return Malformed(path, choose.choice(_BROKEN), None, 400)
    if kind < 0.08:
        return Malformed(path, b" " * choose.randint(1 << 19, 1 << 20), None, 413)
    if kind < 0.12:
        return Malformed(path, json.dumps(_PATHS[path]).encode(), None, 401, choose.choice(["wrong", "x" * 999]))
    wrong = _WRONG | _WRONG_BY_PATH[path]
    field = choose.choice(list(wrong))
    body = _PATHS[path] | {field: choose.choice(wrong[field])}
    return Malformed(path, json.dumps(body).encode(), field)
