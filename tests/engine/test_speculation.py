"""Guessed tokens, verified in one step: the tokens of no speculation in fewer steps, whatever is guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from jattn.llm.engine.guesses import NGramGuesses
from jattn.llm.engine.request.outputs import RequestMetrics
from jattn.llm.engine.request.request import Request
from tests.engine.test_engine import prompts_of, run
from tests.engine.test_weights import other_decoder
from torch_core.base.errors import InvalidInput

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
NGRAMS = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(other_decoder(), EngineConfig(**SIZES))


@pytest.fixture(scope="module")
def guessing() -> Engine:
    return Engine(other_decoder(), EngineConfig(**SIZES, speculative_config=NGRAMS))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_no_speculation(plain, guessing, temperature, seed) -> None:
    (period,) = prompts_of(seed, 4)
    prompts = [period * 3, *prompts_of(seed + 1, 6, 17, 2, 9)]
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=3)

    assert run(guessing, prompts, params) == run(plain, prompts, params)
    stats = guessing.cache_stats()
    assert (stats.used, stats.deferred) == (0, 0)


def test_a_text_that_repeats_itself_takes_fewer_steps_than_it_has_tokens(decoder, seed) -> None:
    # An untrained model with tied embeddings says its last token again and again.
    (prompt,) = prompts_of(seed, 5)
    engine = Engine(decoder, EngineConfig(**SIZES, speculative_config={"num_speculative_tokens": 3}))

    ((*tokens,),) = run(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))

    assert len(set(tokens[4:])) == 1
    assert engine.cache_stats().steps < 20


def test_a_stop_token_among_accepted_guesses_ends_the_request_there(plain, guessing, seed) -> None:
    prompts = prompts_of(seed, 5, 8)
    stop = run(plain, prompts, SAMPLED)[0][7]
    params = SamplingParams(temperature=0.7, max_tokens=24, seed=3, stop_token_ids=(stop,), ignore_eos=True)

    assert run(guessing, prompts, params) == run(plain, prompts, params)


def test_in_a_pool_too_small_for_all_the_tokens_are_the_same(plain, seed) -> None:
    prompts = prompts_of(seed, 20, 2, 9, 14)
    params = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=3)
    small = Engine(other_decoder(), EngineConfig(**SIZES, num_blocks=12, speculative_config=NGRAMS))

    assert run(small, prompts, params) == run(plain, prompts, params)
    assert small.cache_stats().preemptions > 0
    assert small.cache_stats().used == 0


def request_of(tokens: list[int]) -> Request:
    return Request("r", tuple(tokens), SamplingParams(), np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 3))
def test_a_guess_is_what_followed_the_last_place_of_the_longest_match_again_and_again(tokens, count, shortest) -> None:
    longest = shortest + 2
    expected: tuple[int, ...] = ()
    for size in range(longest, shortest - 1, -1):
        places = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[len(tokens) - size :]]
        if places:
            follows = tokens[places[-1] + size :]
            expected = tuple((follows * count)[:count])
            break

    assert NGramGuesses(longest, shortest).guess(request_of(tokens), count) == expected


def test_guesses_follow_the_output_too() -> None:
    guesses, request = NGramGuesses(2, 2), request_of([1, 2, 3])
    assert guesses.guess(request, 2) == ()

    request.output_token_ids += [1, 2]

    assert guesses.guess(request, 2) == (3, 1)


def test_speculation_reads_each_step_before_it_guesses_the_next() -> None:
    config = EngineConfig(speculative_config=NGRAMS, steps_in_flight=2, num_scheduler_steps=4)

    assert (config.steps_in_flight, config.num_scheduler_steps) == (1, 1)


def test_a_command_line_gives_it_as_json() -> None:
    assert SpeculativeConfig.from_json('{"num_speculative_tokens": 3, "prompt_lookup_min": 1}') == NGRAMS
    with pytest.raises(InvalidInput, match=r"speculative_config is 'no', which is no JSON: "):
        SpeculativeConfig.from_json("no")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; it must be from 1 to 64."),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be from 1 to 64."),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_max": 1},
            "prompt_lookup_max is 1; it must be from 2 to 2147483647.",
        ),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 0},
            "prompt_lookup_min is 0; it must be from 1 to 2147483647.",
        ),
        (
            {"num_speculative_tokens": 8},
            (
                "num_speculative_tokens is 8; it must be below max_num_batched_tokens (8), the tokens that a sequence "
                "may get in one step."
            ),
        ),
        (
            {"num_speculative_tokens": 2, "model": 3},
            "model is 3; it must be a folder, a PagedModel, or None for n-grams.",
        ),
        (
            {"num_speculative_tokens": 2, "method": "eagle"},
            (
                "method is 'eagle' and model is None; 'draft_model' needs a model, 'ngram' has none, and there is no "
                "other."
            ),
        ),
        (
            {"k": 2},
            (
                "speculative_config is {'k': 2}; it must be a SpeculativeConfig, or a mapping with "
                "num_speculative_tokens and nothing else but model, method, prompt_lookup_max, prompt_lookup_min."
            ),
        ),
    ],
)
def test_what_cannot_be_is_named(config, message) -> None:
    with pytest.raises(InvalidInput) as error:
        EngineConfig(speculative_config=config, max_num_batched_tokens=8)

    assert str(error.value) == message
