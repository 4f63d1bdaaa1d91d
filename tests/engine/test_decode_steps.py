"""Several decoded tokens in one program: the same tokens, texts and ends as one at a time."""

from __future__ import annotations

from typing import Any

import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.load import TextTokenizer
from tests.engine.conftest import greedy_kind, tiny_decoder
from tests.engine.test_engine import prompts_of
from tests.support.tiny_models import byte_tokenizer

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "fixed_shapes": True}


@pytest.fixture(scope="module")
def single() -> Engine:
    return Engine(tiny_decoder(), EngineConfig(**SIZES, num_scheduler_steps=1))


@pytest.fixture(scope="module")
def several() -> Engine:
    return Engine(tiny_decoder(), EngineConfig(**SIZES, num_scheduler_steps=4))


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str | None]]:
    requests = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while engine.num_unfinished:
        engine.step()
    return [(request.output_token_ids, request.finish_reason) for request in requests]


def params_of(*lengths: int, **changes: object) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, ignore_eos=True, **{"temperature": 0.0, **changes}) for length in lengths]


def test_requests_of_different_lengths_end_where_they_should(single, several, seed) -> None:
    prompts = prompts_of(seed, 6, 1, 13, 4)
    params = params_of(1, 2, 9, 15)

    assert run(several, prompts, params) == run(single, prompts, params)
    assert several.cache_stats().used == 0


def test_random_tokens_are_those_of_single_steps(single, several, seed) -> None:
    prompts = prompts_of(seed, 6, 3)
    params = params_of(14, 11, temperature=1.2, top_k=30, seed=3)

    assert run(several, prompts, params) == run(single, prompts, params)


def test_a_stop_token_in_the_middle_of_a_program_ends_the_request_there(single, several, seed) -> None:
    prompts = prompts_of(seed, 5, 7)
    tokens, _ = run(single, prompts, params_of(12, 12))[0]
    params = [*params_of(12, stop_token_ids=(tokens[3],)), *params_of(12)]

    assert run(several, prompts, params) == run(single, prompts, params)
    assert several.cache_stats().used == 0


def test_requests_of_other_lengths_compile_nothing_more(several, seed) -> None:
    run(several, prompts_of(seed, 5), params_of(30))
    before = several.programs

    run(several, prompts_of(seed, 5), params_of(23))

    assert f"4 sequences, 4 tokens, queries up to 1, 4 steps, {greedy_kind()}" in before
    assert several.programs == before


def test_the_tokens_of_one_program_reach_the_prefix_cache(seed) -> None:
    engine = Engine(tiny_decoder(), EngineConfig(**SIZES, num_scheduler_steps=4))
    (prompt,) = prompts_of(seed, 6)
    ((tokens, _),) = run(engine, [prompt], params_of(11))

    request = engine.add([*prompt, *tokens], params_of(2)[0])
    while engine.num_unfinished:
        engine.step()

    # 17 tokens: the last was sampled and never computed, so 4 whole blocks are there.
    assert request.num_cached_tokens == 16


@pytest.mark.parametrize("num_characters", [1, 2])
def test_a_stop_string_drops_the_tokens_that_came_with_it(num_characters) -> None:
    tokenizer = TextTokenizer(byte_tokenizer())
    decoder = tiny_decoder(vocab_size=512)
    one, many = (
        LLM(decoder, tokenizer=tokenizer, config=EngineConfig(**SIZES, num_scheduler_steps=count)) for count in (1, 4)
    )
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    text = one.generate("stop here", plain)[0].outputs[0].text
    stop = text[3 : 3 + num_characters]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,))

    deltas = list(many.stream("stop here", params))
    output = deltas[-1].output
    assert output is not None
    completion = output.outputs[0]

    assert completion == one.generate("stop here", params)[0].outputs[0]
    assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids
    assert many.engine.cache_stats().used == 0
