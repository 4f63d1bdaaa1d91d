"""Who drops or closes an engine has its pool's memory back at once; what cannot fit is refused with the numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device import runner
from tests.engine.conftest import tiny_decoder
from tests.engine.cores import CoreEngine
from tests.engine.test_engine import GREEDY, prompts_of, run
from torch_core.base.errors import InvalidInput, PoolLost

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, num_host_blocks=4, scrub_on_free=True)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_engine_frees_its_pool_without_the_collector(decoder, seed) -> None:
    engine = Engine(decoder, CONFIG)
    run(engine, prompts_of(seed, 5, 9))
    array = weakref.ref(engine._core.device.pool._arrays[0])

    del engine

    assert array() is None


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_llm_with_an_open_stream_frees_its_pool_without_the_collector(decoder, seed) -> None:
    llm = LLM(decoder, config=CONFIG)
    stream = llm.stream(prompts_of(seed, 5, 9), GREEDY)
    next(stream)
    assert isinstance(llm.engine, Engine)
    array = weakref.ref(llm.engine._core.device.pool._arrays[0])

    del llm, stream

    assert array() is None


@pytest.mark.usefixtures("no_collector")
def test_an_engine_that_survived_a_failing_callback_frees_its_pool_when_dropped(seed, monkeypatch) -> None:
    engine = Engine(tiny_decoder(implementation="torch"), CONFIG)
    (prompt,) = prompts_of(seed, 5)
    expected = run(engine, [prompt])
    fail_callbacks(monkeypatch, count=1)

    assert run(engine, [prompt]) == expected
    assert engine._core.device.pool.generation > 1
    array = weakref.ref(engine._core.device.pool._arrays[0])
    del engine

    assert array() is None


@pytest.mark.usefixtures("no_collector")
def test_an_engine_that_raised_the_loss_of_its_pool_frees_it_when_dropped(seed, monkeypatch) -> None:
    engine = Engine(tiny_decoder(implementation="torch"), CONFIG)
    engine.add(prompts_of(seed, 5)[0], GREEDY)
    # A GPU runs the rest of a program that failed, and says so when its results are read.
    fail_callbacks(monkeypatch, count=100)
    try:
        for _ in range(8):
            engine.step()
    except PoolLost as error:
        assert "planted" in str(error)  # noqa: PT017 (what pytest.raises returns would keep the frames)
    else:
        pytest.fail("the second failure in a row was not raised")
    pool = weakref.ref(engine._core.device.pool)

    del engine

    assert pool() is None


def fail_callbacks(monkeypatch: pytest.MonkeyPatch, *, count: int) -> None:
    """Makes so many of the next callbacks of torch raise inside XLA."""
    from jattn.bridge import callback

    original, left = callback._TorchCallback._run, [None] * count

    def fail(self, context, outputs, arguments):
        if not left:
            return original(self, context, outputs, arguments)
        left.pop()
        raise RuntimeError("planted")

    monkeypatch.setattr(callback._TorchCallback, "_run", fail)


def test_closing_gives_the_memory_back_while_somebody_still_holds_the_engine(decoder, seed) -> None:
    engine = Engine(decoder, CONFIG)
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)
    engine.step()
    array = engine._core.device.pool._arrays[0]

    engine.close()
    engine.close()

    assert array.is_deleted()
    assert (request.finish_reason, engine.num_unfinished) == ("cancelled", 0)
    with pytest.raises(InvalidInput, match="the engine is closed; build another one"):
        engine.step()


def test_a_context_manager_closes_the_engine_and_ends_its_streams(decoder, seed) -> None:
    with LLM(decoder, config=CONFIG) as llm:
        stream = llm.stream(prompts_of(seed, 5, 9), GREEDY)
        next(stream)

    outputs = [delta.output for delta in stream if delta.output is not None]
    assert [output.outputs[0].finish_reason for output in outputs] == ["cancelled"] * 2
    stream.close()
    assert llm.engine.closed


def test_a_pool_larger_than_this_machines_memory_is_refused_before_it_is_allocated(decoder) -> None:
    with pytest.raises(InvalidInput, match=r"^128,000,000,000 bytes are needed and [\d,]+ are free on "):
        Engine(decoder, EngineConfig(num_blocks=31_250_000))


def test_more_slots_than_an_int32_counts_are_refused(decoder) -> None:
    with pytest.raises(InvalidInput) as error:
        Engine(decoder, EngineConfig(num_blocks=10**9))

    assert str(error.value) == (
        "num_blocks is 1000000000; with blocks of 16 tokens it must be at most 134217727, because slots are int32."
    )


def test_all_log_probabilities_of_a_prompt_leave_the_device_part_by_part(decoder, monkeypatch) -> None:
    held: list[type] = []
    part = runner.PromptPart

    def made(*fields: Any) -> runner.PromptPart:
        held.append(type(fields[-1].top_ids))
        return part(*fields)

    monkeypatch.setattr(runner, "_PROMPT_LOGPROBS", 4)
    monkeypatch.setattr(runner, "PromptPart", made)
    engine = CoreEngine(decoder, replace(CONFIG, max_num_seqs=1))
    request = engine.add(list(range(1, 31)), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1))
    while engine.num_unfinished:
        engine.step()

    assert held == [np.ndarray] * 8
    found: Any = request.output().prompt_logprobs
    assert [len(each) for each in found[1:]] == [decoder.config.vocab_size] * 29
