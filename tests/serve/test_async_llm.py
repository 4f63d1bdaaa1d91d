"""AsyncLLM: many tasks and threads over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jattn.llm.engine import LLM, CompletionOutput, EngineConfig, Outbox, RequestOutputKind, SamplingParams
from jattn.llm.engine.clients.stream import PromptReader
from jattn.llm.engine.core import EngineCore
from jattn.llm.serve import AsyncLLM
from jattn.llm.serve.async_llm import Submission, Update, _Mailbox
from tests.support.tiny_models import write_tiny_model
from torch_core.base.errors import InvalidInput, PoolLost, Unsupported

CONFIG = EngineConfig(block_size=8, max_num_seqs=4, max_num_batched_tokens=64, num_scheduler_steps=1, fixed_shapes=True)
PROMPTS = [f"prompt {index}" for index in range(8)]
KINDS = RequestOutputKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def expected(folder) -> list[str]:
    return [output.outputs[0].text for output in LLM(folder, config=CONFIG).generate(PROMPTS, params_of())]


@pytest.fixture
def llm(folder) -> Iterator[AsyncLLM]:
    with AsyncLLM(LLM(folder, config=CONFIG)) as llm:
        yield llm


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | changes)


async def outputs_of(llm: AsyncLLM, prompt: Any, **params: Any) -> list[Any]:
    return [output async for output in llm.generate(prompt, params_of(**params))]


def is_idle(llm: AsyncLLM) -> bool:
    for _ in range(6000):
        if not llm.num_unfinished and not llm.llm.engine.num_unfinished:
            break
        time.sleep(0.01)
    return llm.num_unfinished == 0 and llm.llm.engine.cache_stats().used == 0


def test_the_kinds_of_output_say_the_same(llm, expected) -> None:
    async def ask() -> list[list[Any]]:
        return [await outputs_of(llm, PROMPTS[0], output_kind=kind) for kind in KINDS]

    cumulative, deltas, final = asyncio.run(ask())

    assert [output.outputs[0].text for output in final] == [expected[0]]
    assert "".join(output.outputs[0].text for output in deltas) == expected[0]
    texts = [output.outputs[0].text for output in cumulative]
    assert texts[-1] == expected[0]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert sum((output.outputs[0].token_ids for output in deltas), ()) == final[0].outputs[0].token_ids


def test_a_step_wakes_an_event_loop_once_for_all_of_its_requests(llm, monkeypatch) -> None:
    wakes, steps = [], []
    loop_class, step = asyncio.get_event_loop_policy().new_event_loop().__class__, EngineCore.step
    wake = loop_class.call_soon_threadsafe

    def count(loop: Any, call: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "jattn-engine":
            wakes.append(call)
        return wake(loop, call, *args, **options)

    def step_and_count(core: EngineCore) -> None:
        steps.append(core)
        step(core)

    monkeypatch.setattr(loop_class, "call_soon_threadsafe", count)
    monkeypatch.setattr(EngineCore, "step", step_and_count)

    async def ask() -> None:
        submission = await llm.submit(PROMPTS[:4], params_of())
        assert len([update async for _, update in submission]) > len(PROMPTS[:4])

    asyncio.run(ask())

    assert 0 < len(wakes) <= len(steps)


def test_requests_that_wait_for_a_step_leave_the_loops_threads_free(llm, expected, monkeypatch) -> None:
    step, go_on = EngineCore.step, threading.Event()

    def wait_and_step(core: EngineCore) -> None:
        go_on.wait(60)
        step(core)

    monkeypatch.setattr(EngineCore, "step", wait_and_step)

    async def ask() -> list[str]:
        asking = [asyncio.ensure_future(outputs_of(llm, PROMPTS[0], output_kind=KINDS.FINAL_ONLY)) for _ in range(64)]
        while not llm.num_unfinished:
            await asyncio.sleep(0.001)
        # By default a loop has 32 threads at most.
        await asyncio.wait_for(asyncio.to_thread(go_on.set), 30)
        return [outputs[0].outputs[0].text for outputs in await asyncio.gather(*asking)]

    assert asyncio.run(ask()) == [expected[0]] * 64


def test_tasks_of_several_threads_get_their_own_answers(llm, expected) -> None:
    texts: dict[int, str] = {}

    async def ask(index: int) -> None:
        texts[index] = (await outputs_of(llm, PROMPTS[index]))[-1].outputs[0].text

    async def ask_all(indices: range) -> None:
        await asyncio.gather(*map(ask, indices))

    threads = [threading.Thread(target=asyncio.run, args=(ask_all(range(at, 8, 3)),)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [texts[index] for index in range(8)] == expected


def test_samples_of_one_prompt_end_together(llm) -> None:
    (output,) = asyncio.run(outputs_of(llm, "x", n=3, temperature=1.0, seed=4, output_kind=KINDS.FINAL_ONLY))

    assert len({each.token_ids for each in output.outputs}) == 3
    assert is_idle(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_finished_with_the_last_of_its_samples(llm, kind) -> None:
    outputs = asyncio.run(outputs_of(llm, "x", n=3, temperature=1.0, seed=4, output_kind=kind))

    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_cancelled_task_and_a_closed_generator_cancel_their_requests(llm, expected) -> None:
    async def ask() -> list[Any]:
        task = asyncio.create_task(outputs_of(llm, "long", max_tokens=200))
        never_started = asyncio.create_task(outputs_of(llm, "never", max_tokens=200))
        async with contextlib.aclosing(llm.stream("also long", params_of(max_tokens=200, n=2))) as updates:
            await anext(updates)
        never_started.cancel()
        task.cancel()
        for each in (task, never_started):
            with pytest.raises(asyncio.CancelledError):
                await each
        return await outputs_of(llm, PROMPTS[1])

    assert asyncio.run(ask())[-1].outputs[0].text == expected[1]
    assert is_idle(llm)


def test_of_several_prompts_one_bad_one_starts_none(llm) -> None:
    async def ask() -> None:
        await llm.submit(["fine", [1, 999]], params_of(max_tokens=200))

    with pytest.raises(InvalidInput, match=r"^prompts\[1\]: prompt token 1 is -?\d+, outside the vocabulary"):
        asyncio.run(ask())
    assert is_idle(llm)


@pytest.mark.parametrize("kind", [ZeroDivisionError, asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_an_error_on_the_way_to_one_caller_ends_its_request_alone(llm, expected, kind) -> None:
    def deliver(update: Any) -> None:
        raise kind

    llm.add("broken", params_of(max_tokens=200), deliver=deliver)

    assert asyncio.run(outputs_of(llm, PROMPTS[2]))[-1].outputs[0].text == expected[2]
    assert is_idle(llm)


def test_every_caller_learns_of_the_end_where_one_of_them_raises(folder) -> None:
    llm, told = AsyncLLM(LLM(folder, config=CONFIG)), []

    def deliver(update: Any) -> None:
        if isinstance(update, Exception):
            told.append(update)
            raise asyncio.CancelledError

    for _ in range(3):
        llm.add("long", params_of(max_tokens=200), deliver=deliver)
    with contextlib.suppress(asyncio.CancelledError):
        llm.close()

    assert [str(error) for error in told] == ["the AsyncLLM was closed before the request ended."] * 3
    assert llm.llm.engine.closed


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_is_not_copied(llm, take) -> None:
    for owner in (llm, llm.llm):
        with pytest.raises(Unsupported, match=f"^an object of {type(owner).__name__} cannot be copied or pickled; "):
            take(owner)


def test_a_device_that_keeps_failing_ends_the_requests_with_its_error_and_is_tried_again(
    llm, expected, monkeypatch
) -> None:
    step, failures = EngineCore.step, 3

    def failing(core: EngineCore) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise PoolLost("gone", generation=1)
        step(core)

    monkeypatch.setattr(EngineCore, "step", failing)

    with pytest.raises(PoolLost, match="gone"):
        asyncio.run(outputs_of(llm, PROMPTS[0]))
    assert asyncio.run(outputs_of(llm, PROMPTS[3]))[-1].outputs[0].text == expected[3]
    assert is_idle(llm)


def test_requests_survive_the_sleep_of_their_engine(llm, expected, monkeypatch) -> None:
    step, told, woken = EngineCore.step, threading.Event(), threading.Event()

    def step_until_told(core: EngineCore) -> None:
        # The first request must not end before the engine sleeps.
        if woken.is_set() or not told.is_set():
            step(core)
        if core.ready:
            told.set()

    monkeypatch.setattr(EngineCore, "step", step_until_told)

    async def ask() -> list[str]:
        updates = llm.stream(PROMPTS[0], params_of())
        text = (await anext(updates)).new.text
        llm.llm.engine.sleep()
        later = asyncio.create_task(outputs_of(llm, PROMPTS[1]))
        cancelled = asyncio.create_task(outputs_of(llm, PROMPTS[2]))
        while llm.num_unfinished < 3:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        while llm.num_unfinished > 2:
            await asyncio.sleep(0.01)
        woken.set()
        llm.llm.engine.wake()
        text += "".join([update.new.text async for update in updates])
        return [text, (await later)[-1].outputs[0].text]

    assert asyncio.run(ask()) == expected[:2]
    assert is_idle(llm)


def test_a_request_that_is_added_when_its_loop_is_gone_leaves_a_sleeping_engine(llm, monkeypatch) -> None:
    engine, asked, is_gone = llm.llm.engine, threading.Event(), threading.Event()
    add = type(engine).add

    def add_late(*args: Any, **options: Any) -> Any:
        asked.set()
        is_gone.wait(60)
        return add(*args, **options)

    monkeypatch.setattr(type(engine), "add", add_late)
    engine.sleep()

    async def ask() -> None:
        with llm.reserve(1) as reservation:
            asking = asyncio.ensure_future(llm.submit(PROMPTS[:1], params_of(), reservation=reservation))
            await asyncio.to_thread(asked.wait, 60)
            assert llm.num_unfinished == 1
            asking.cancel()

    asyncio.run(ask())
    is_gone.set()
    llm._adders.shutdown()
    engine.settle()
    assert llm.num_unfinished == engine.num_unfinished == 0


def test_a_negative_number_of_samples_is_not_reserved(llm) -> None:
    with pytest.raises(InvalidInput, match=r"^num_samples is -1; it must be an int of at least 0\.$"), llm.reserve(-1):
        pass
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        pytest.param(PROMPTS[:3], [6, 6, 6, 6, 6], id="queued"),
        pytest.param([PROMPTS[0], [1, 999], PROMPTS[1]], [6, 6, 0], id="refused"),
    ],
)
def test_a_reserved_sample_counts_once_from_its_reservation_to_its_end(llm, monkeypatch, prompts, expected) -> None:
    engine, counts = llm.llm.engine, []
    subscribe = engine.subscribe

    def count_and_subscribe(*args: Any) -> None:
        # Between the queue's call and the task that waits for it.
        counts.append(llm.num_unfinished)
        subscribe(*args)

    monkeypatch.setattr(engine, "subscribe", count_and_subscribe)
    engine.sleep()

    async def ask() -> None:
        with contextlib.ExitStack() as submissions:
            with contextlib.suppress(InvalidInput), llm.reserve(2 * len(prompts)) as reservation:
                counts.append(llm.num_unfinished)
                submissions.enter_context(await llm.submit(prompts, params_of(n=2), reservation=reservation))
            counts.append(llm.num_unfinished)

    asyncio.run(ask())
    assert (counts, llm.num_unfinished) == (expected, 0)


def test_a_request_leaves_a_sleeping_engine_with_the_last_reference_to_its_updates(llm) -> None:
    loop, engine = asyncio.new_event_loop(), llm.llm.engine
    engine.sleep()
    submission = loop.run_until_complete(llm.submit(PROMPTS[:2], params_of()))
    loop.close()
    assert llm.num_unfinished == engine.num_unfinished == 2
    del submission, loop
    gc.collect()
    engine.settle()
    assert llm.num_unfinished == engine.num_unfinished == 0


def test_a_request_with_the_id_of_one_that_two_threads_end_is_not_forgotten(llm) -> None:
    engine = llm.llm.engine

    def end_and_add() -> None:
        llm.cancel("same")
        engine.settle()
        llm.add(PROMPTS[1], params_of(), deliver=print, request_id="same")

    class Interrupted(dict[Any, Any]):
        interrupt: Any = staticmethod(end_and_add)

        def pop(self, *arguments: Any) -> Any:
            interrupt, self.interrupt = self.interrupt, lambda: None
            interrupt()
            return super().pop(*arguments)

    llm._entries = Interrupted()
    engine.sleep()
    llm.add(PROMPTS[0], params_of(), deliver=print, request_id="same")
    llm.cancel("same")
    assert llm.num_unfinished == 1
    llm.cancel("same")
    engine.settle()
    assert llm.num_unfinished == engine.num_unfinished == 0


def test_closing_ends_what_runs_with_an_error_and_refuses_what_comes(folder) -> None:
    llm = AsyncLLM(LLM(folder, config=CONFIG))

    async def ask() -> None:
        async for _ in llm.stream("long", params_of(max_tokens=200)):
            await asyncio.to_thread(llm.close)

    with pytest.raises(InvalidInput, match=r"the AsyncLLM was closed before the request ended\."):
        asyncio.run(ask())
    with pytest.raises(InvalidInput, match=r"the AsyncLLM is closed; build another one\."):
        llm.add("x", deliver=print)
    assert not llm.is_running


def test_a_request_that_comes_while_another_thread_closes_is_refused_as_a_later_one_is(folder, monkeypatch) -> None:
    llm = AsyncLLM(LLM(folder, config=CONFIG))
    submit = llm._adders.submit

    def close_and_submit(*work: Any) -> Any:
        llm.close()
        return submit(*work)

    monkeypatch.setattr(llm._adders, "submit", close_and_submit)
    with pytest.raises(InvalidInput, match=r"the AsyncLLM is closed; build another one\."):
        asyncio.run(outputs_of(llm, PROMPTS[0]))


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_request_that_is_queued_while_another_thread_closes_ends_with_an_error_alone(
    folder, monkeypatch, is_followed
) -> None:
    llm, told = AsyncLLM(LLM(folder, config=CONFIG)), []
    engine, add, subscribe = llm.llm.engine, llm.llm.engine.add, llm.llm.engine.subscribe

    def add_and_close(*args: Any, **options: Any) -> Any:
        request = add(*args, **options)
        llm.close()
        return request

    def close_and_subscribe(outbox: Outbox, *args: Any) -> None:
        # By steps that ran for others.
        while engine.runs_for(outbox):
            engine.step()
        llm.close()
        subscribe(outbox, *args)

    monkeypatch.setattr(engine, *(("subscribe", close_and_subscribe) if is_followed else ("add", add_and_close)))
    llm.add(PROMPTS[0], params_of(), deliver=told.append)

    assert [str(each) for each in told] == ["the AsyncLLM was closed before the request ended."]


def test_an_error_while_the_last_output_is_made_reaches_the_caller(llm, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(PromptReader, "output", broken)
    with pytest.raises(RuntimeError, match="the request failed: broken"):
        asyncio.run(outputs_of(llm, PROMPTS[0], output_kind=KINDS.FINAL_ONLY))


def test_an_error_is_not_overtaken_by_later_parts() -> None:
    async def ask() -> None:
        submission = Submission(None, _Mailbox(asyncio.get_running_loop()))  # type: ignore[arg-type]
        submission.entries += [None, None]  # type: ignore[list-item]
        part = Update(CompletionOutput("x", (1,), None), False, None)
        for update in (part, ZeroDivisionError(), part):
            submission._updates.put_nowait((0, update))
        turns = 0
        async for _ in submission.joined():
            # A reader that is slower than the steps.
            submission._updates.put_nowait((0, part))
            turns += 1
            assert turns < 9

    with pytest.raises(ZeroDivisionError):
        asyncio.run(ask())


def test_parts_that_wait_together_come_as_one(llm, expected) -> None:
    async def ask() -> tuple[list[int], list[str], int]:
        params = params_of(logprobs=1, output_kind=KINDS.FINAL_ONLY)
        submission = await llm.submit(PROMPTS[:2], params)
        # All that comes waits for its reader.
        while llm.num_unfinished:
            await asyncio.sleep(0.001)
        # The second prompt may be added, and end, first.
        parts = sorted([part async for part in submission.joined()], key=lambda part: part[0])
        for _, new, output in parts:
            assert output is not None
            (whole,) = output.outputs
            assert (new.text, new.token_ids, new.logprobs) == (whole.text, whole.token_ids, whole.logprobs)
            assert new.cumulative_logprob == pytest.approx(whole.cumulative_logprob)
        return [index for index, _, _ in parts], [new.text for _, new, _ in parts], len(parts)

    assert asyncio.run(ask()) == ([0, 1], expected[:2], 2)
