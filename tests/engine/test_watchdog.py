"""What the engine logs: steps that do not come back, and the life of requests. By a clock of the tests' own."""

from __future__ import annotations

import json
import logging
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams
from jattn.llm.engine.request.outputs import RequestMetrics
from jattn.llm.engine.request.request import Request
from jattn.llm.engine.scheduler import ScheduledRow, ScheduledStep
from jattn.llm.reports import Compiling, Watchdog
from tests.engine.test_engine import prompts_of, run
from tests.engine.test_interrupts import SIZES
from torch_core.base.errors import InvalidInput


class Clock:
    """Says what it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def step_of(step_id: int) -> ScheduledStep:
    request = Request("r", (1, 2), SamplingParams(), np.zeros(0, np.int32), frozenset(), RequestMetrics(0.0))
    committed: Any = SimpleNamespace(step_id=step_id)
    return ScheduledStep((ScheduledRow(request, 0, 2, 1),), committed)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a JSON formatter would write of it."""
    plain = vars(logging.makeLogRecord({}))
    return {name: value for name, value in vars(record).items() if name not in plain and name != "message"}


@pytest.fixture
def watched() -> tuple[Watchdog, Clock]:
    clock = Clock()
    return Watchdog(30.0, lambda step: {"program": "a program"}, clock=clock), clock


def test_a_step_that_does_not_come_is_reported_once_with_its_plan(watched, caplog) -> None:
    watchdog, clock = watched
    watchdog.dispatched(step_of(7))
    clock.now += 29
    watchdog.check()
    assert not caplog.records

    clock.now += 2
    watchdog.check()
    watchdog.check()

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jattn", "WARNING")
    assert json.loads(json.dumps(fields(record))) == {
        "event": "stuck_step",
        "step_id": 7,
        "age_seconds": 31,
        "num_seqs": 1,
        "num_tokens": 2,
        "request_ids": ["r"],
        "program": "a program",
    }
    assert record.getMessage().startswith("stuck_step: step_id=7 age_seconds=31.0 num_seqs=1")


def test_one_that_comes_late_is_said_to_have_come(watched, caplog) -> None:
    watchdog, clock = watched
    step = step_of(7)
    watchdog.dispatched(step)
    clock.now += 40
    watchdog.check()
    clock.now += 5

    watchdog.came(step)

    assert fields(caplog.records[-1]) == {"event": "stuck_step_came", "step_id": 7, "age_seconds": 45}


def test_steps_that_came_and_steps_of_work_that_was_thrown_away_are_not_reported(watched, caplog) -> None:
    watchdog, clock = watched
    first, second = step_of(1), step_of(2)
    watchdog.dispatched(first)
    watchdog.came(first)
    watchdog.dispatched(second)
    watchdog.forget()
    clock.now += 100

    watchdog.check()
    watchdog.came(second)

    assert not caplog.records


def test_the_time_of_compiling_does_not_count_and_a_long_compilation_is_said_to_be_one(caplog) -> None:
    clock, found = Clock(), [Compiling()]
    watchdog = Watchdog(30.0, lambda step: {}, lambda: found[0], clock)
    watchdog.dispatched(step_of(7))
    clock.now += 40
    found[0] = Compiling(39.0, "a program", 39.0)

    watchdog.check()
    watchdog.check()

    (record,) = caplog.records
    assert fields(record) == {"event": "compiling", "program": "a program", "age_seconds": 39.0}
    found[0] = Compiling(39.0)
    clock.now += 30
    watchdog.check()
    assert fields(caplog.records[-1])["event"] == "stuck_step"
    assert fields(caplog.records[-1])["age_seconds"] == 31


def test_the_thread_ends_with_what_it_watches() -> None:
    watchdog = Watchdog(1e3, lambda step: {})
    watchdog.dispatched(step_of(1))
    thread, gone = watchdog._thread, weakref.ref(watchdog)
    assert thread is not None
    assert thread.is_alive()

    del watchdog
    thread.join(10)

    assert gone() is None
    assert not thread.is_alive()


def test_without_a_limit_there_is_no_thread() -> None:
    watchdog = Watchdog(None, lambda step: {})
    watchdog.dispatched(step_of(1))

    assert watchdog._thread is None


def test_a_stuck_step_of_an_engine_names_its_program(decoder, seed, caplog) -> None:
    engine = Engine(decoder, EngineConfig(**SIZES, step_timeout_seconds=1e5))
    clock = Clock()
    watchdog = engine._core.device.watchdog
    watchdog._clock = clock
    engine.add(prompts_of(seed, 5)[0], SamplingParams(max_tokens=6, ignore_eos=True), request_id="mine")
    while not watchdog._out:
        engine.step()
    clock.now += 1e6

    watchdog.check()

    found = fields(caplog.records[0])
    assert (found["event"], found["request_ids"], found["num_seqs"]) == ("stuck_step", ["mine"], 1)
    assert found["program"].startswith("4 sequences, ")


def test_an_engine_says_what_it_compiles_and_compiles_each_program_once(decoder, seed, monkeypatch) -> None:
    engine = Engine(decoder, replace(EngineConfig(**SIZES), num_blocks=77))
    programs = engine._core.device.runner.programs
    right, said = programs._compile, []

    def compiled(lowered: Any, bucket: Any) -> Any:
        said.append((str(bucket), programs.compiling.program))
        return right(lowered, bucket)

    monkeypatch.setattr(programs, "_compile", compiled)
    for _ in range(2):
        run(engine, prompts_of(seed, 5), SamplingParams(max_tokens=3, ignore_eos=True))

    assert said
    assert all(compiling == bucket for bucket, compiling in said)
    assert len({bucket for bucket, _ in said}) == len(said)
    assert programs.compiling == Compiling(programs.compile_seconds)


def test_the_life_of_requests_is_logged(decoder, seed, caplog) -> None:
    caplog.set_level(logging.DEBUG, "jattn")
    engine = Engine(decoder, EngineConfig(**SIZES))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    run(engine, prompts_of(seed, 20, 9, 14), params)

    found = [(record.levelname, fields(record)) for record in caplog.records]
    mine = [(level, each["event"]) for level, each in found if each.get("request_id") == "#0"]
    assert mine[:2] == [("DEBUG", "request_added"), ("DEBUG", "request_started")]
    assert mine[-1] == ("DEBUG", "request_finished")
    preempted = [each for level, each in found if each["event"] == "request_preempted" and level == "INFO"]
    assert len(preempted) == engine.cache_stats().preemptions > 0
    ended = next(each for _, each in found if each["event"] == "request_finished")
    assert (ended["reason"], ended["num_output_tokens"]) == ("length", 12)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), True, "60"])
def test_a_limit_that_is_no_time_is_refused(limit) -> None:
    with pytest.raises(InvalidInput, match=r"step_timeout_seconds is .*; it must be a number above 0 and below 1e6"):
        EngineConfig(step_timeout_seconds=limit)
