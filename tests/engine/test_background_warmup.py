"""Programs that compile while the engine runs: their order, the larger ones that stand in, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, cast

import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.programs import Programs
from jattn.llm.engine.device.sampler import Sampler
from jattn.llm.engine.device.warmup import WarmUp, in_order
from jattn.llm.engine.options.params import SamplingKind
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of, run

PLAIN, FULL = Sampler(SamplingKind.PLAIN), Sampler(SamplingKind.FULL)
PROMPTS = [Bucket(rows, 64 * rows, 64, kind) for rows in (1, 4, 16) for kind in (PLAIN, FULL)]
DECODING = [Bucket(rows, rows * steps, 1, kind, steps) for rows in (1, 8) for steps in (1, 4) for kind in (PLAIN, FULL)]
ALL = [*PROMPTS, *DECODING]


class Compiler:
    """Stands in for `Programs`: each program is compiled when the test says so."""

    def __init__(self, failing: Bucket | None = None, most: int = 16) -> None:
        self.compiled: dict[Bucket, Bucket] = {}
        self.begun: SimpleQueue[Bucket] = SimpleQueue()
        self.permits = threading.Semaphore(0)
        self._failing, self._most = failing, most

    def num_compilers(self) -> int:
        return self._most

    def ensure(self, bucket: Bucket) -> None:
        self.begun.put(bucket)
        self.permits.acquire()
        if bucket == self._failing:
            raise ValueError("planted")
        self.compiled[bucket] = bucket


@pytest.fixture
def one_thread(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def started(compiler: Compiler, buckets: list[Bucket] = ALL) -> tuple[WarmUp, list[tuple[int, int]], threading.Event]:
    told: list[tuple[int, int]] = []
    finished = threading.Event()
    programs = cast(Programs, compiler)
    return WarmUp(programs, buckets, lambda *news: told.append(news[:2]), finished.set), told, finished


def test_a_short_prompt_and_its_decoding_come_first_and_then_the_programs_that_serve_every_step() -> None:
    order, num_needed = in_order(ALL)

    assert order[:3] == [Bucket(1, 64, 64, PLAIN), Bucket(1, 4, 1, PLAIN, 4), Bucket(1, 1, 1, PLAIN)]
    assert set(order[3:num_needed]) == {Bucket(16, 1024, 64, FULL), Bucket(8, 8, 1, FULL), Bucket(8, 32, 1, FULL, 4)}
    assert len(order) == len(ALL)
    assert set(order) == set(ALL)


def test_no_more_programs_are_compiled_at_once_than_the_memory_holds_their_kernels(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    compiler = Compiler(most=2)
    warming, _, finished = started(compiler, PROMPTS)
    running = [thread for thread in threading.enumerate() if thread.name == "jattn-warmup"]
    for _ in PROMPTS:
        compiler.permits.release()

    assert finished.wait(60)
    assert len(running) == 2
    warming.end()


def test_a_program_serves_no_step_that_is_larger_of_another_kind_or_shares_prefixes_otherwise() -> None:
    large = Bucket(4, 256, 64, FULL)

    assert large.covers(Bucket(1, 64, 64, PLAIN))
    assert not any(Bucket(1, 64, 64, PLAIN).covers(each) for each in (large, Bucket(1, 64, 64, FULL)))
    assert not any(large.covers(each) for each in DECODING)
    assert not Bucket(8, 8, 1, FULL, 1, piece_tokens=4).covers(Bucket(8, 8, 1, FULL))
    assert Bucket(8, 8, 1, FULL).covers(Bucket(8, 8, 1, FULL, 1, piece_tokens=4))


def test_a_missing_program_is_compiled_next_and_the_smallest_larger_one_serves_meanwhile(one_thread) -> None:
    compiler = Compiler()
    for bucket in (Bucket(16, 1024, 64, FULL), Bucket(4, 256, 64, PLAIN)):
        compiler.compiled[bucket] = bucket
    warming, _, _ = started(compiler)
    assert compiler.begun.get() == Bucket(1, 64, 64, PLAIN)

    assert warming.find(Bucket(1, 64, 64, FULL)) == Bucket(16, 1024, 64, FULL)
    assert warming.find(Bucket(1, 64, 64, PLAIN)) == Bucket(4, 256, 64, PLAIN)
    assert warming.find(Bucket(8, 8, 1, PLAIN)) is None

    compiler.permits.release(len(ALL))
    assert [compiler.begun.get() for _ in range(2)] == [Bucket(8, 8, 1, PLAIN), Bucket(1, 64, 64, FULL)]
    warming.end()


def test_it_is_ready_when_every_step_is_served_and_finished_after_the_last_program(one_thread) -> None:
    compiler = Compiler()
    warming, told, finished = started(compiler)
    _, num_needed = in_order(ALL)
    for _ in range(num_needed):
        assert not warming.is_ready
        compiler.begun.get()
        compiler.permits.release()
    # The next one begins when the last of these is counted.
    compiler.begun.get()

    assert warming.is_ready
    assert not finished.is_set()
    compiler.permits.release(len(ALL))
    assert finished.wait(60)
    assert told == [(done, len(ALL)) for done in range(1, len(ALL) + 1)]


def test_a_program_that_cannot_be_compiled_is_logged_and_the_others_follow(one_thread, caplog) -> None:
    compiler = Compiler(failing=PROMPTS[0])
    compiler.permits.release(len(ALL))

    warming, _, finished = started(compiler)

    assert finished.wait(60)
    assert warming.is_ready
    # A step that needs it must not wait for it.
    assert (warming.find(PROMPTS[0]), warming.awaits(PROMPTS[0])) == (PROMPTS[1], False)
    assert set(compiler.compiled) == set(ALL) - {PROMPTS[0]}
    assert [record.getMessage() for record in caplog.records] == [
        f"the program for {PROMPTS[0]} cannot be compiled: planted"
    ]


def test_at_its_end_waiting_programs_are_dropped(one_thread) -> None:
    compiler = Compiler()
    warming, told, finished = started(compiler)
    compiler.begun.get()
    ending = threading.Thread(target=warming.end)
    ending.start()
    # Programs that it has not begun are gone; the one under way is waited for.
    while warming._waiting:
        pass
    compiler.permits.release(len(ALL))
    ending.join(60)

    assert (len(compiler.compiled), told, finished.is_set()) == (1, [], False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    # Few programs: one shape of prompts and one of decoding.
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_logprobs": 3}
    config = EngineConfig(**sizes, num_scheduler_steps=1, fixed_shapes=True)
    with Engine(tiny_decoder(num_hidden_layers=1, implementation="xla"), config) as engine:
        yield engine


def test_requests_are_answered_while_programs_compile_and_in_the_end_all_are_there(engine, seed) -> None:
    told: list[tuple[int, int]] = []
    finished = threading.Event()

    def report(done: int, total: int, name: str) -> None:
        told.append((done, total))
        if done == total:
            finished.set()

    assert engine.is_ready
    engine.warmup(report, background=True)
    answers = run(engine, prompts_of(seed, 3, 20))
    assert finished.wait(120)

    assert engine.is_ready
    # Also those that a step needed before its turn.
    assert len(engine.programs) == engine.num_compilations == told[-1][1]
    assert run(engine, prompts_of(seed, 3, 20)) == answers
