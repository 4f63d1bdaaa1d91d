"""Prompts that are taken for computed ones, and programs that are compiled by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from tests.engine.conftest import tiny_decoder
from tests.support.devices import on_four_devices
from torch_core.base.errors import InvalidInput

DECODES = "1 sequences, 1 tokens, queries up to 1, plain"


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Of one sequence at a time."""
    with Engine(tiny_decoder(), EngineConfig(block_size=4, max_num_seqs=1, num_scheduler_steps=1)) as engine:
        yield engine


def test_a_prompt_taken_for_computed_is_found_in_the_cache_and_nothing_else_is_compiled(engine: Engine) -> None:
    engine.warmup(wanted=DECODES.__eq__)
    engine.assume_computed([list(range(8))])
    request = engine.add(list(range(9)), SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.num_unfinished:
        engine.step()

    assert request.num_cached_tokens == 8
    assert engine.num_compilations == 1


@on_four_devices
def test_a_pool_that_is_cut_over_devices_takes_prompts_for_computed_too() -> None:
    model = tiny_decoder(num_key_value_heads=4)
    config = EngineConfig(block_size=4, max_num_seqs=1, num_scheduler_steps=1, tensor_parallel_size=4)
    with Engine(model, config) as engine:
        engine.assume_computed([list(range(8))])
        request = engine.add(list(range(9)), SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.num_unfinished:
            engine.step()

    assert request.num_cached_tokens == 8


def test_prompts_are_not_taken_for_computed_while_requests_are_unfinished(engine: Engine) -> None:
    engine.add([1, 2, 3])

    with pytest.raises(InvalidInput, match="1 requests are unfinished"):
        engine.assume_computed([[1, 2, 3, 4]])
    assert engine.num_unfinished == 1
