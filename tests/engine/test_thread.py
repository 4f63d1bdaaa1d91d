"""The thread of an engine: interrupts of its callers, its end, and what it does while nobody waits."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.clients.stream import TextStream
from jattn.llm.engine.core import EngineCore
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.engine.thread import EngineThread
from jattn.llm.load import TextTokenizer
from jattn.pool import HostBlocks, KVPool
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.tiny_models import byte_tokenizer
from torch_core.base.errors import EngineClosed, InvalidInput, PoolLost, Unsupported
from torch_core.base.specs import KVCacheSpec

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=40, fixed_shapes=True)
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from tests.engine.conftest import tiny_decoder
from tests.engine.test_thread import CONFIG
from jattn.llm.engine import LLM, SamplingParams
llm = LLM(tiny_decoder(), config=CONFIG)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=99, ignore_eos=True))
next(stream)
print("ended")
"""


@pytest.fixture(scope="module")
def engine(decoder) -> Engine:
    return Engine(decoder, CONFIG)


def test_ctrl_c_in_generate_reaches_its_caller_and_no_step(monkeypatch) -> None:
    llm = LLM(tiny_decoder(vocab_size=512), tokenizer=TextTokenizer(byte_tokenizer()), config=CONFIG)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = llm.generate(["some text", "other"], params)
    step, steps = EngineCore.step, []

    def step_and_signal(core: EngineCore) -> None:
        steps.append(core)
        if len(steps) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        step(core)

    monkeypatch.setattr(EngineCore, "step", step_and_signal)
    # A shell lets its background jobs ignore the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["some text", "other"], params)
    finally:
        signal.signal(signal.SIGINT, handler)

    assert llm.engine.num_unfinished == 0
    assert [each.outputs for each in llm.generate(["some text", "other"], params)] == [
        each.outputs for each in expected
    ]
    assert llm.engine.cache_stats().used == 0


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_thread_ends_with_its_engine(decoder, end, seed) -> None:
    engine = Engine(decoder, CONFIG)
    engine.add(prompts_of(seed, 5)[0], GREEDY)
    thread = engine._thread._thread
    assert thread.is_alive()

    if end == "close":
        engine.close()
    else:
        del engine
        gc.collect()

    assert not thread.is_alive()


def test_an_engine_that_cannot_be_built_leaves_no_thread(decoder) -> None:
    before = set(threading.enumerate())

    with pytest.raises(InvalidInput, match=r"^the budget of"):
        Engine(decoder, EngineConfig(block_size=4, kv_cache_bytes=4096))

    assert {thread for thread in threading.enumerate() if thread.name == "jattn-engine"} <= before


def test_a_program_ends_while_requests_run() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert (finished.returncode, finished.stdout.strip()) == (0, "ended"), finished.stderr


def test_nothing_runs_while_nobody_waits(engine, seed) -> None:
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)

    engine.settle()

    assert request.output_token_ids == []
    engine.cancel(request.request_id)


def test_a_listener_gets_every_token_and_then_no_more(engine, seed) -> None:
    (prompt,) = prompts_of(seed, 5)
    (expected,) = run(engine, [prompt])
    outbox, said, ended = Outbox(), [], threading.Event()

    def listen(news: list[TokenDelta] | BaseException) -> None:
        assert isinstance(news, list)
        for delta in news:
            said.extend(delta.token_ids)
            if delta.finish_reason is not None:
                ended.set()

    engine.add(prompt, GREEDY, outbox=outbox)
    engine.subscribe(outbox, listen)

    assert ended.wait(60)
    assert said == expected
    assert not engine.runs_for(outbox)


def test_listeners_that_share_an_end_have_it_called_once_behind_them(engine, seed) -> None:
    told, ended = [], threading.Event()

    def end() -> None:
        told.append("end")
        if not any(map(engine.runs_for, outboxes)):
            ended.set()

    outboxes = [Outbox(), Outbox()]
    for prompt, outbox in zip(prompts_of(seed, 5, 5), outboxes, strict=True):
        engine.add(prompt, GREEDY, outbox=outbox)
    for outbox in outboxes:
        engine.subscribe(outbox, told.append, end)

    assert ended.wait(60)
    assert told[-1] == "end"
    assert told.count("end") < len(told) - told.count("end")


ENDS = [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize("kind", ENDS)
def test_a_listener_or_a_reply_that_raises_anything_leaves_the_thread_alive(engine, seed, kind) -> None:
    (prompt,) = prompts_of(seed, 5)
    (expected,) = run(engine, [prompt])
    called = threading.Event()

    def fail(news: object) -> None:
        called.set()
        raise kind

    listened, replied = Outbox(), Outbox()
    engine.add(prompt, GREEDY, outbox=listened)
    engine.subscribe(listened, fail)
    engine.notify(replied, fail)
    assert called.wait(60)
    engine.abandon(listened)

    assert run(engine, [prompt]) == [expected]


@pytest.mark.parametrize("kind", ENDS)
def test_an_idle_core_that_raises_anything_leaves_the_thread_alive(engine, seed, monkeypatch, kind) -> None:
    def fail(core: EngineCore) -> None:
        monkeypatch.undo()
        raise kind

    monkeypatch.setattr(EngineCore, "settle", fail)
    engine.settle()

    assert run(engine, prompts_of(seed, 5)[:1])


def test_a_step_that_fails_is_raised_in_one_caller_and_the_next_goes_on(engine, seed, monkeypatch) -> None:
    prompts = prompts_of(seed, 5, 9)
    expected = run(engine, prompts)
    step, failures = EngineCore.step, [None]

    def fail_once(core: EngineCore) -> None:
        if failures:
            failures.pop()
            raise PoolLost("planted", generation=1)
        step(core)

    outboxes = Outbox(), Outbox()
    requests = [engine.add(prompt, GREEDY, outbox=box) for prompt, box in zip(prompts, outboxes, strict=True)]
    monkeypatch.setattr(EngineCore, "step", fail_once)
    with pytest.raises(PoolLost, match="planted"):
        engine.wait(outboxes[0])
    for outbox in outboxes:
        while engine.wait(outbox):
            pass

    assert [request.output_token_ids for request in requests] == expected


def test_a_command_from_the_engines_own_thread_runs_at_once(engine) -> None:
    assert engine._thread.call(lambda core: engine._thread.call(EngineCore.speculation_stats)).num_drafts == 0


def test_a_closed_engine_refuses_commands_and_gives_what_it_has(decoder, seed) -> None:
    engine, outbox = Engine(decoder, CONFIG), Outbox()
    engine.add(prompts_of(seed, 5)[0], GREEDY, outbox=outbox)
    engine.close()

    assert [delta.finish_reason for delta in engine.wait(outbox)] == ["cancelled"]
    for call in (engine.step, engine.sleep, engine.cache_stats, lambda: engine.wait(outbox)):
        with pytest.raises(EngineClosed, match="the engine is closed; build another one"):
            call()


def test_commands_behind_the_end_of_the_thread_are_answered(decoder, seed) -> None:
    engine, outbox = Engine(decoder, CONFIG), Outbox()
    engine.add(prompts_of(seed, 5)[0], GREEDY, outbox=outbox)
    told: list[Any] = []
    replies: list[Any] = []
    engine.close()

    engine.subscribe(outbox, told.append)
    engine.notify(Outbox(), replies.append)

    assert [delta.finish_reason for delta in told[0]] == ["cancelled"]
    assert [type(reply.error) for reply in replies] == [EngineClosed]


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_a_thread_or_device_memory_is_not_copied(engine, take) -> None:
    pool = KVPool(KVCacheSpec(num_kv_heads=1, head_size=8, block_size=4, dtype="float32"), num_layers=1, num_blocks=2)
    owners = [
        engine,
        engine._thread,
        engine._thread.core,
        pool,
        HostBlocks(pool, 1),
        TextStream(engine, None, Outbox(), []),
    ]

    for owner in owners:
        with pytest.raises(Unsupported, match=f"^an object of {type(owner).__name__} cannot be copied or pickled; "):
            take(owner)


def test_an_engine_thread_without_a_core_reports_the_error() -> None:
    def build() -> EngineCore:
        raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        EngineThread(build)


@pytest.mark.parametrize("background", [False, True])
def test_a_warm_up_runs_every_compiled_program_and_changes_no_answer(engine, seed, monkeypatch, background) -> None:
    prompts = prompts_of(seed, 5, 17, 9)
    params = [
        GREEDY,
        SamplingParams(temperature=0.7, top_k=5, max_tokens=6, seed=3, logprobs=1, repetition_penalty=1.2),
    ]
    expected = [run(engine, prompts, each) for each in params]
    caches = [np.array(each) for each in engine._core.device.pool._arrays]
    ran = []
    runner = engine._core.device.runner
    real = runner._run
    monkeypatch.setattr(runner, "_run", lambda bucket, *rest: (ran.append(bucket), real(bucket, *rest))[1])
    monkeypatch.setattr(runner.programs, "on_gpu", True)
    monkeypatch.setattr(runner, "_rehearsed", set())

    engine.warmup(lambda *_: None, wanted=lambda name: False, background=background)
    # A program of the background is a command, and so are these, which come between.
    between = [engine._thread.call(lambda core: len(ran)) for _ in range(20)]

    assert len(set(between)) > 1 if background else set(between) == {len(ran)}
    assert Counter(ran) == dict.fromkeys(runner.programs.compiled, 2)
    for before, after in zip(caches, engine._core.device.pool._arrays, strict=True):
        np.testing.assert_array_equal(before, np.array(after))
    assert [run(engine, prompts, each) for each in params] == expected
