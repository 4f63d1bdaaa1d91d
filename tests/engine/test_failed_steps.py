"""Steps that fail and take the pool with them: what they cost, what is raised, and what is compiled anew."""

from __future__ import annotations

import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.engine.request.request import Request
from tests.engine.test_engine import GREEDY, prompts_of, run
from torch_core.base.errors import PoolLost

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def engine(decoder) -> Engine:
    return Engine(decoder, CONFIG)


class _FailingSteps:
    """Makes the runner's n-th dispatch consume the pool and then fail, as a callback that raises does."""

    def __init__(self, engine: Engine, *, failures: set[int]) -> None:
        self._dispatch = engine._core.device.runner.dispatch
        self._engine = engine
        self._failures = failures
        self._count = 0
        engine._core.device.runner.dispatch = self

    def __call__(self, step):
        self._count += 1
        tokens = self._dispatch(step)
        if self._count in self._failures:
            pool = self._engine._core.device.pool
            with pool.guard():
                for array in pool._arrays:
                    array.delete()
                raise RuntimeError("planted")
        return tokens


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failed_step_costs_time_and_no_answers(engine, decoder, in_flight, seed) -> None:
    prompts = prompts_of(seed, 7, 12, 3)
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, steps_in_flight=in_flight)
    other = Engine(decoder, config)
    _FailingSteps(other, failures={1, 4, 9})

    assert run(other, prompts) == run(engine, prompts)
    assert other._core.device.pool.generation == 4
    assert other.cache_stats().used == 0


def test_two_failed_steps_in_a_row_are_raised_and_the_engine_goes_on(decoder, engine, seed) -> None:
    prompts = prompts_of(seed, 7)
    other = Engine(decoder, CONFIG)
    _FailingSteps(other, failures={2, 3})
    request = other.add(prompts[0], GREEDY)
    other.step()
    other.step()

    with pytest.raises(PoolLost, match="planted"):
        other.step()
    while other.num_unfinished:
        other.step()

    assert [request.output_token_ids] == run(engine, prompts)


def test_the_program_of_a_failed_step_is_compiled_anew(decoder, seed) -> None:
    """XLA fails a program for ever that failed on a GPU while it was recorded."""
    other = Engine(decoder, CONFIG)
    programs = other._core.device.runner.programs
    run(other, prompts_of(seed, 7, 3, 5, 2))
    run(other, prompts_of(seed, 7))
    before = dict(programs.compiled)
    failed = set(programs.last)
    _FailingSteps(other, failures={2})

    run(other, prompts_of(seed, 7))

    anew = {bucket for bucket, program in before.items() if programs.compiled.get(bucket) is not program}
    assert failed <= anew < before.keys()
    executables = [each[bucket].runtime_executable() for each in (before, programs.compiled) for bucket in failed]
    assert len(set(map(id, executables))) == 2 * len(failed)


def test_a_request_that_ended_in_a_failed_step_is_not_ended_again_by_a_cancel(engine, seed, monkeypatch) -> None:
    def fail(request: Request) -> None:
        raise MemoryError

    monkeypatch.setattr(engine._core._rebuilt().scheduler, "finish", fail)
    with pytest.raises(MemoryError):
        run(engine, prompts_of(seed, 7))
    (request,) = engine._core.requests.values()

    assert engine.cancel(request.request_id).finish_reason == request.finish_reason == "length"
    assert engine.num_unfinished == 0
    engine._core.cache.audit()
