"""Sampling parameters and the states of a request."""

from __future__ import annotations

import contextlib
import functools
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest

from jattn.llm.engine.options.params import SamplingParams, StructuredOutputsParams
from jattn.llm.engine.request.outputs import RequestMetrics
from jattn.llm.engine.request.request import Request, RequestState
from tests.engine.interrupts import InterruptAt
from torch_core.base.errors import InvalidInput


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be a finite float32 of at least 0."),
        ({"temperature": float("nan")}, "temperature is nan; it must be a finite float32 of at least 0."),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number."),
        ({"top_k": -2}, "top_k is -2; it must be from -1 to 1048576 (0 or -1 for all)."),
        ({"top_k": True}, "top_k is True; it must be an int from -1 to 1048576 (0 or -1 for all)."),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1."),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1."),
        ({"max_tokens": 0}, "max_tokens is 0; it must be from 1 to 2147483647."),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295, or None."),
        ({"stop": ("",)}, "stop must hold at most 16 strings, none of them empty."),
        ({"stop": ("x",) * 17}, "stop must hold at most 16 strings, none of them empty."),
        ({"stop_token_ids": (-1,)}, "stop_token_ids[0] is -1; it must be from 0 to 2147483647."),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a sequence."),
        ({"stop": 5}, "stop is 5; it must be a sequence."),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; it must be a sequence."),
        ({"bad_words": False}, "bad_words is False; it must be a sequence."),
        ({"stop_token_ids": ""}, "stop_token_ids is ''; it must be a sequence."),
        ({"temperature": 10**400}, "temperature is an int of 1329 bits; it must be a number that fits a float."),
        ({"temperature": 1e39}, "temperature is 1e+39; it must be a finite float32 of at least 0."),
        ({"max_tokens": 10**5000}, "max_tokens is an int of 16610 bits; it must be from 1 to 2147483647."),
        ({"seed": -(10**5000)}, "seed is an int of 16610 bits; it must be from 0 to 4294967295, or None."),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False."),
        ({"n": 0}, "n is 0; it must be from 1 to 1024."),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1."),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be a finite float32 above 0."),
        ({"presence_penalty": -3}, "presence_penalty is -3.0; it must be from -2 to 2."),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf; it must be from -2 to 2."),
        ({"min_tokens": 17}, "min_tokens is 17; it must not be above max_tokens (16)."),
        ({"logprobs": -2}, "logprobs is -2; it must be from -1 to 2147483647, or None."),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2; it must be from -1 to 2147483647, or None."),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1, at least 1, or None."),
        ({"logit_bias": [3]}, "logit_bias is [3]; it must be a mapping, or None."),
        ({"logit_bias": {3: float("nan")}}, "logit_bias[3] is nan; it must be a finite float32."),
        ({"logit_bias": {"3": 1}}, "a token of logit_bias is '3'; it must be an int from 0 to 2147483647."),
        (
            {"logit_bias": dict.fromkeys(range(513), 1)},
            "logit_bias has 513 entries; it must have 512 at most.",
        ),
        ({"bad_words": "word"}, "bad_words is a string; pass a tuple of strings."),
        ({"bad_words": ["a" * 1025]}, "bad_words has a text of 1025 bytes; a text must have 1024 at most."),
        ({"bad_words": ["a\ud800"]}, "bad_words has 'a\\ud800'; UTF-8 has no lone surrogates."),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty; name at least one token, or pass None for all."),
        (
            {"stop": "x", "detokenize": False},
            "stop is given and detokenize is False; stop strings are found in the text.",
        ),
        ({"output_kind": "all"}, "output_kind is 'all'; it must be a RequestOutputKind."),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs is {'regex': 'a'}; it must be StructuredOutputsParams, or None.",
        ),
    ],
)
def test_sampling_parameters_out_of_range_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        SamplingParams(**arguments)

    assert str(error.value) == message


def test_a_generator_of_stop_token_ids_is_read_once_and_kept() -> None:
    params = SamplingParams(stop_token_ids=cast(Any, iter((3, 5))), stop=cast(Any, iter(("a",))))

    assert (params.stop_token_ids, params.stop) == ((3, 5), ("a",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "structured_outputs has nothing; give one of json, regex, choice, grammar, json_object."),
        (
            {"json": {}, "regex": "a"},
            "structured_outputs has json and regex; give one of json, regex, choice, grammar, json_object.",
        ),
        ({"regex": 5}, "regex is 5; it must be text."),
        ({"json": 5}, "json is 5; it must be a schema as a mapping or as text."),
        ({"json": {"const": {1, 2}}}, "json is no schema that JSON can spell: a set is none of its values."),
        ({"json": {"const": "a" * (1 << 17)}}, "json has 131085 characters; it must have 131072 at most."),
        ({"json": np.array([1, 2])}, "json is array([1, 2]); it must be a schema as a mapping or as text."),
        ({"regex": np.array(["a", "b"])}, "regex is array(['a', 'b'], dtype='<U1'); it must be text."),
        ({"choice": "yes"}, "choice is a string; pass a tuple of strings."),
        ({"choice": []}, "choice is empty; give at least one string."),
        ({"json_object": "x"}, "json_object is 'x'; it must be True or False."),
        ({"regex": "a" * (1 << 18)}, "regex has 262144 characters; it must have 131072 at most."),
    ],
)
def test_structured_outputs_of_the_wrong_kind_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        StructuredOutputsParams(**arguments)

    assert str(error.value) == message


@pytest.mark.parametrize(
    "schema",
    [{(1, 2): 3}, functools.reduce(lambda inner, _: {"not": inner}, range(10**5), {})],
    ids=["keys", "depth"],
)
def test_a_schema_that_json_cannot_spell_is_refused(schema: dict) -> None:
    with pytest.raises(InvalidInput, match=r"^json is no schema that JSON can spell: "):
        StructuredOutputsParams(json=schema)


def test_a_schema_may_be_any_mapping() -> None:
    schema = MappingProxyType({"properties": MappingProxyType({"a": {"type": "integer"}})})

    assert StructuredOutputsParams(json=schema).schema() == '{"properties": {"a": {"type": "integer"}}}'


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def request_of(prompt: tuple[int, ...], **params: Any) -> Request:
    return Request("r", prompt, SamplingParams(**params), np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0))


def test_a_request_moves_only_along_legal_moves() -> None:
    request = request_of((1,))
    request.move(RequestState.RUNNING)
    request.move(RequestState.FINISHED)

    with pytest.raises(InvalidInput, match="request 'r' is finished; it cannot become running"):
        request.move(RequestState.RUNNING)


def test_known_tokens_join_prompt_and_output_at_any_cut() -> None:
    request = request_of((1, 2, 3))
    request.output_token_ids += [4, 5]

    assert [request.token_ids(start, stop) for start, stop in ((0, 5), (2, 4), (3, 5), (0, 2))] == [
        [1, 2, 3, 4, 5],
        [3, 4],
        [4, 5],
        [1, 2],
    ]


def test_pending_tokens_count_towards_the_limit() -> None:
    request = request_of((1,), max_tokens=2)
    request.output_token_ids.append(7)
    request.num_pending_tokens = 1

    assert request.num_wanted_tokens == 0
    assert (request.num_known_tokens, request.num_tokens) == (2, 3)


def test_a_delivery_that_an_exception_ends_at_any_line_repeats_and_loses_nothing() -> None:
    for line in range(1, 12):
        request = request_of((1,))
        request.output_token_ids += [5, 6]
        with contextlib.suppress(MemoryError), InterruptAt(line, MemoryError()):
            request.deliver()
        if request.num_delivered < 2:
            request.deliver()
        assert [delta.token_ids for delta in request.outbox.take()] == [(5, 6)], line
