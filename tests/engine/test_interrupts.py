"""Exceptions at any line of a step, and interrupted callers: no block leaks, no token is wrong, lost or repeated."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.request.request import Request
from jattn.llm.load import TextTokenizer
from jattn.llm.models import Decoder
from tests.engine.conftest import tiny_decoder
from tests.engine.cores import CoreEngine
from tests.engine.interrupts import InterruptAt, InterruptAtReply
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.tiny_models import byte_tokenizer
from torch_core.base.errors import InvalidInput, PoolLost

# One shape of a step each for prompts and for tokens: what is compiled here is interrupted, not compared.
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_blocks": 12,
    "fixed_shapes": True,
}
KINDS = (KeyboardInterrupt, MemoryError, PoolLost)
# Each meets others of the moves: preemption, swap, scrub, overlapping steps, prefix hits.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "swap": {"num_host_blocks": 12, "enable_prefix_caching": False},
    "scrub": {"scrub_on_free": True},
    "no overlap": {"steps_in_flight": 1},
    "speculation": {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "prompts beside decoding": {"fixed_shapes": False},
    "swap and scrub": {"num_host_blocks": 12, "scrub_on_free": True},
}

_DAILY = ("prompts beside decoding", "swap and scrub")

TEXT = SamplingParams(temperature=0.0, max_tokens=9, stop=("zz",), ignore_eos=True)


def error_of(kind: type[BaseException]) -> BaseException:
    return PoolLost("planted", generation=0) if kind is PoolLost else kind("planted")


class Service:
    """A caller that is interrupted again and again, and compares every answer with that of a lone run."""

    def __init__(self, engine: Engine | CoreEngine, lone: Engine, seed: int, *, temperature: float = 0.0) -> None:
        self.engine = engine
        self.lone = lone
        self.random = random.Random(seed)
        self.shared = prompts_of(seed, 8)[0]
        self.live: dict[str, tuple[Request, list[int]]] = {}
        self.said: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.added = 0
        self.temperature = temperature

    def add(self) -> None:
        tail = [self.random.randrange(97) for _ in range(self.random.randrange(1, 14))]
        prompt = [*(self.shared if self.random.random() < 0.5 else []), *tail]
        params = SamplingParams(
            temperature=self.temperature, max_tokens=self.random.randrange(1, 10), seed=self.added, ignore_eos=True
        )
        name = f"r{self.added}"
        before = self.engine._core.num_added
        try:
            request = self.engine.add(prompt, params, request_id=name)
        except BaseException:
            assert name not in self.engine._core.requests
            raise
        assert self.engine._core.num_added == before + 1
        self.live[name] = (request, prompt)
        self.added += 1

    def step(self) -> None:
        for delta in self.engine.step():
            self.said.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                assert self.reasons.setdefault(delta.request_id, delta.finish_reason) == delta.finish_reason

    def cancel(self) -> None:
        if unfinished := [name for name, (request, _) in self.live.items() if request.finish_reason is None]:
            name = self.random.choice(unfinished)
            try:
                self.engine.cancel(name)
            except InvalidInput:
                # The step that was interrupted before had read its last token: the call finds that it has ended.
                assert self.live[name][0].finish_reason is not None

    def act(self) -> None:
        choice = self.random.random()
        if choice < 0.3 and len(self.live) < 6:
            self.add()
        elif choice < 0.36:
            self.cancel()
        else:
            self.step()

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.num_unfinished:
                break
            self.step()
        else:
            raise AssertionError("the engine makes no progress")
        self.step()

    def check(self) -> None:
        """Every answer is the lone run's; every token was said once; every block is free."""
        alone = {name: self.lone.add(prompt, request.params) for name, (request, prompt) in self.live.items()}
        while self.lone.num_unfinished:
            self.lone.step()
        for name, (request, _) in self.live.items():
            assert request.finish_reason is not None, name
            expected = alone[name].output_token_ids
            count = len(request.output_token_ids)
            assert request.output_token_ids == expected[:count], name
            if request.finish_reason == "length":
                assert count == len(expected), name
                assert self.said.get(name, []) == expected, name
                assert self.reasons[name] == "length", name
        stats = self.engine.cache_stats()
        assert (stats.used, stats.deferred, stats.steps_in_flight, stats.num_sequences) == (0, 0, 0, 0)
        self.engine._core.cache.audit()
        self.live.clear()


def interrupt_often(config: str, decoder: Decoder, seed: int, *, count: int) -> list[str]:
    lone = Engine(decoder, EngineConfig(**SIZES))
    engine = CoreEngine(decoder, EngineConfig(**(SIZES | CONFIGS[config])))
    service = Service(engine, lone, seed)
    # Compiled before the interrupts, so that lines are steps' and not traces'.
    for _ in range(12):
        service.act()
    service.drain()
    places = []
    while len(places) < count:
        kind = service.random.choice(KINDS)
        interrupt = InterruptAt(service.random.randrange(1, 6000), error_of(kind))
        try:
            with interrupt:
                while interrupt.place is None:
                    service.act()
        except KINDS:
            pass
        print(kind.__name__, interrupt.place)
        places.append(interrupt.place)
        for _ in range(service.random.randrange(3)):
            service.act()
        service.drain()
        service.check()
    return places


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=() if name in _DAILY else pytest.mark.nightly) for name in CONFIGS]
)
def test_an_exception_at_any_line_of_the_core_loses_nothing(config, decoder, seed) -> None:
    places = interrupt_often(config, decoder, seed, count=30)

    assert len(places) == 30
    assert len(set(places)) > 20


class _Dispatch:
    """Raises in place of one dispatch, or, with `lost`, takes the pool's contents with it."""

    def __init__(self, engine: Any, error: BaseException, *, at: int, lost: bool) -> None:
        self._device = engine._core.device
        self._dispatch = self._device.runner.dispatch
        self._error, self._left, self._lost = error, at, lost
        self._device.runner.dispatch = self

    def __call__(self, step):
        self._left -= 1
        if self._left:
            return self._dispatch(step)
        self._device.runner.dispatch = self._dispatch
        with self._device.pool.guard():
            if self._lost:
                self._device.pool._arrays[0].delete()
            raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OverflowError()], ids=lambda e: type(e).__name__)
def test_a_dispatch_that_fails_and_leaves_the_pool_is_taken_back(decoder, error, seed) -> None:
    prompts = prompts_of(seed, 24, 7)
    lone = Engine(decoder, EngineConfig(**SIZES, steps_in_flight=2))
    engine = Engine(decoder, EngineConfig(**SIZES, steps_in_flight=2))
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    # The second chunk of a prompt, with the first in flight.
    _Dispatch(engine, error, at=2, lost=False)

    engine.step()
    with pytest.raises(type(error)):
        engine.step()
    assert engine.cache_stats().steps_in_flight == 0
    while engine.num_unfinished:
        engine.step()

    assert [request.output_token_ids for request in requests] == run(lone, prompts)
    assert engine.cache_stats().used == engine.cache_stats().deferred == 0


def test_prefix_keys_do_not_outlive_a_pool_that_an_interrupt_lost(decoder, seed) -> None:
    first, second = prompts_of(seed, 20, 3)
    lone, engine = (Engine(decoder, EngineConfig(**SIZES)) for _ in range(2))
    run(engine, [first])
    _Dispatch(engine, KeyboardInterrupt(), at=1, lost=True)
    engine.add(second, GREEDY)

    with pytest.raises(KeyboardInterrupt):
        engine.step()
    again = engine.add(first, GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert again.num_cached_tokens == 0
    assert [again.output_token_ids] == run(lone, [first])


def test_prefix_keys_do_not_outlive_a_pool_that_was_renewed_between_two_steps(decoder, seed) -> None:
    (prompt,) = prompts_of(seed, 20)
    engine = Engine(decoder, EngineConfig(**SIZES))
    expected = run(engine, [prompt])

    engine._core.device.pool.renew()
    again = engine.add(prompt, GREEDY)
    while engine.num_unfinished:
        engine.step()

    assert again.num_cached_tokens == 0
    assert [again.output_token_ids] == expected


@pytest.fixture
def replies(decoder) -> tuple[Engine, InterruptAtReply]:
    engine = Engine(decoder, EngineConfig(**SIZES))
    return engine, InterruptAtReply(engine)


def interrupted(replies: InterruptAtReply, call: Callable[[], object]) -> None:
    replies.armed = True
    with pytest.raises(KeyboardInterrupt):
        call()


def test_a_request_whose_caller_was_interrupted_before_he_had_it_is_not_run(replies, seed) -> None:
    engine, reply = replies
    first, second = prompts_of(seed, 5, 9)
    (expected,) = run(engine, [first])

    request = engine.add(first, GREEDY)
    interrupted(reply, lambda: engine.add(second, GREEDY, request_id="lost"))
    deltas = []
    while engine.num_unfinished:
        deltas += engine.step()

    assert {delta.request_id for delta in deltas} == {request.request_id}
    assert request.output_token_ids == expected


def test_what_an_interrupted_step_brought_comes_with_the_next(replies, seed) -> None:
    engine, reply = replies
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)
    said = []

    while engine.num_unfinished:
        interrupted(reply, engine.step)
        said += [token for delta in engine.step() for token in delta.token_ids]

    assert said == request.output_token_ids


def test_an_end_that_an_interrupt_kept_from_who_cancelled_comes_with_the_next_step(replies, seed) -> None:
    engine, reply = replies
    request = engine.add(prompts_of(seed, 5)[0], GREEDY)

    interrupted(reply, lambda: engine.cancel(request.request_id))

    assert [(delta.request_id, delta.finish_reason) for delta in engine.step()] == [(request.request_id, "cancelled")]
    assert engine.step() == []


def lose_pool_in(engine: Engine, method: str) -> None:
    """Makes the next call of a pool's method fail with its contents."""
    pool = engine._core.device.pool
    original = getattr(pool, method)

    def fail(*args):
        setattr(pool, method, original)
        with pool.guard():
            pool._arrays[0].delete()
            raise RuntimeError("planted")

    setattr(pool, method, fail)


def test_a_pool_lost_while_a_request_is_swapped_out_loses_no_request(decoder, seed) -> None:
    prompts = prompts_of(seed, 20, 2, 9, 14)
    lone = Engine(decoder, EngineConfig(**SIZES))
    engine = Engine(decoder, EngineConfig(**(SIZES | CONFIGS["swap"])))
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    lose_pool_in(engine, "read_blocks")

    while engine.num_unfinished:
        engine.step()

    assert engine._core.device.pool.generation == 2
    assert [request.output_token_ids for request in requests] == run(lone, prompts)


def test_a_pool_lost_in_the_idle_scrub_does_not_take_the_last_tokens_with_it(decoder, seed) -> None:
    (prompt,) = prompts_of(seed, 9)
    engine = Engine(decoder, EngineConfig(**SIZES, scrub_on_free=True, enable_prefix_caching=False))
    request = engine.add(prompt, GREEDY)
    said = []
    lose_pool_in(engine, "scrub_blocks")

    while request.finish_reason is None:
        said += [token for delta in engine.step() for token in delta.token_ids]

    assert engine._core.device.pool.generation == 2
    assert said == request.output_token_ids
    assert run(engine, [prompt]) == [said]


def test_a_pool_lost_while_cancelling_is_recovered(decoder, seed) -> None:
    prompts = prompts_of(seed, 9, 5)
    engine = Engine(decoder, EngineConfig(**SIZES, scrub_on_free=True, enable_prefix_caching=False))
    expected = run(engine, prompts)
    request = engine.add(prompts[0], GREEDY)
    engine.step()
    lose_pool_in(engine, "scrub_blocks")

    assert engine.cancel(request.request_id).finish_reason == "cancelled"
    assert run(engine, prompts) == expected


def test_an_interrupt_at_any_line_of_generate_leaves_nothing_behind(seed) -> None:
    llm = LLM(tiny_decoder(vocab_size=512), tokenizer=TextTokenizer(byte_tokenizer()), config=EngineConfig(**SIZES))
    choose = random.Random(seed)
    expected = llm.generate(["some text", "other"], TEXT)
    places = set()

    for _ in range(30):
        interrupt = InterruptAt(choose.randrange(1, 4000), KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            while interrupt.place is None:
                llm.generate(["some text", "other"], TEXT)
        places.add(interrupt.place)

        print(interrupt.place)
        assert llm.engine.num_unfinished == 0
        assert [output.outputs for output in llm.generate(["some text", "other"], TEXT)] == [
            output.outputs for output in expected
        ]
        assert llm.engine.cache_stats().used == 0

    assert len(places) > 20
