"""Several callers of one engine: streams within streams, threads, cancels; everybody gets their own, and all of it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig, Outbox, SamplingParams
from jattn.llm.load import TextTokenizer
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import GREEDY, prompts_of, run
from tests.support.tiny_models import byte_tokenizer
from torch_core.base.errors import InvalidInput

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=40, fixed_shapes=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_decoder(vocab_size=512), tokenizer=TextTokenizer(byte_tokenizer()), config=CONFIG)


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_two_open_streams_each_get_their_own_tokens(llm, seed) -> None:
    prompts = prompts_of(seed, 5, 9)
    expected = tokens_of(llm, prompts)
    streams = [llm.stream([prompt], GREEDY) for prompt in prompts]
    said: list[list[int]] = [[], []]

    open_streams = [0, 1]
    while open_streams:
        for number in list(open_streams):
            delta = next(streams[number], None)
            if delta is None:
                open_streams.remove(number)
            else:
                said[number] += delta.token_ids

    assert [tuple(tokens) for tokens in said] == expected


def test_generate_inside_the_loop_of_a_stream_serves_both(llm, seed) -> None:
    outer, inner = prompts_of(seed, 6, 11)
    expected = tokens_of(llm, [outer, inner])
    said, answers = [], []

    for delta in llm.stream([outer], GREEDY):
        said += delta.token_ids
        answers += tokens_of(llm, [inner])

    assert tuple(said) == expected[0]
    assert set(answers) == {expected[1]}


def test_cancelling_a_streamed_request_ends_its_stream(llm, seed) -> None:
    first, second = prompts_of(seed, 6, 11)
    expected = tokens_of(llm, [second])
    stream = llm.stream([first, second], GREEDY)
    next(stream)
    (name, *_) = llm.engine._core.requests

    llm.engine.cancel(name)
    outputs = {delta.index: delta.output for delta in stream if delta.output is not None}

    assert [outputs[index].outputs[0].finish_reason for index in (0, 1)] == ["cancelled", "length"]
    assert outputs[1].outputs[0].token_ids == expected[0]


def test_tokens_of_a_stream_and_of_step_do_not_mix(llm, seed) -> None:
    first, second = prompts_of(seed, 6, 11)
    expected = tokens_of(llm, [first, second])
    stepped = llm.engine.add(first, GREEDY)

    streamed = [token for delta in llm.stream([second], GREEDY) for token in delta.token_ids]
    said = []
    while stepped.finish_reason is None or len(said) < 12:
        said += [token for delta in llm.engine.step() for token in delta.token_ids]

    assert [tuple(said), tuple(streamed)] == expected


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_was_never_read_leaves_nothing_queued(llm, end, seed) -> None:
    stream = llm.stream(prompts_of(seed, 6, 11), GREEDY)
    assert llm.engine.num_unfinished == 2

    if end == "close":
        stream.close()
    else:
        del stream

    assert llm.engine.num_unfinished == 0
    assert llm.engine.cache_stats().num_sequences == 0


def test_a_closed_stream_has_ended(llm, seed) -> None:
    stream = llm.stream(prompts_of(seed, 6), GREEDY)
    next(stream)
    stream.close()

    assert list(stream) == []


@pytest.mark.parametrize("method", ["wait", "abandon"])
def test_only_an_outbox_is_waited_for_or_abandoned(decoder, method) -> None:
    with pytest.raises(InvalidInput, match=r"^outbox is 'x'; it must be an Outbox\.$"):
        getattr(Engine(decoder, CONFIG), method)("x")


def test_an_outbox_without_requests_is_not_waited_for(decoder) -> None:
    assert Engine(decoder, CONFIG).wait(Outbox()) == []


def test_automatic_ids_and_a_users_never_meet(decoder, seed) -> None:
    engine = Engine(decoder, CONFIG)
    prompts = prompts_of(seed, 3, 4, 5)
    expected = run(engine, prompts)

    requests = [engine.add(prompts[0], GREEDY, request_id="request-1"), *(engine.add(p, GREEDY) for p in prompts[1:])]
    while engine.num_unfinished:
        engine.step()

    assert [request.output_token_ids for request in requests] == expected
    assert len({request.request_id for request in requests}) == 3
    with pytest.raises(InvalidInput, match="request_id is '#7'; ids that begin with '#' are the engine's own numbers"):
        engine.add(prompts[0], GREEDY, request_id="#7")


class Callers:
    """Threads that generate, stream and cancel at random on one LLM, and compare with a lone run."""

    def __init__(self, seed: int, *, num_prompts: int = 12) -> None:
        model = tiny_decoder(vocab_size=512)
        tokenizer = TextTokenizer(byte_tokenizer())
        lone = LLM(model, tokenizer=tokenizer, config=CONFIG)
        self.llm = LLM(model, tokenizer=tokenizer, config=CONFIG)
        self.random = random.Random(seed)
        self.work = []
        for prompt in prompts_of(seed, *(self.random.randrange(1, 20) for _ in range(num_prompts))):
            stop = ("e",) if self.random.random() < 0.3 else ()
            params = SamplingParams(
                temperature=0.8,
                max_tokens=self.random.randrange(1, 9),
                seed=5,
                stop=stop,
                ignore_eos=True,
            )
            self.work.append((prompt, params, lone.generate([prompt], params)[0].outputs[0]))

    def run(self, num_threads: int, num_requests: int) -> None:
        each = -(-num_requests // num_threads)
        with ThreadPoolExecutor(num_threads) as threads:
            calls = [threads.submit(self._caller, number, each) for number in range(num_threads)]
            assert sum(call.result(timeout=600) for call in calls) >= num_requests
        assert self.llm.engine.num_unfinished == 0
        stats = self.llm.engine.cache_stats()
        assert (stats.used, stats.deferred, stats.num_sequences) == (0, 0, 0)

    def _caller(self, number: int, count: int) -> int:
        choose = random.Random(number)
        for _ in range(count):
            prompt, params, expected = choose.choice(self.work)
            if choose.random() < 0.5:
                (output,) = self.llm.generate([prompt], params)
                assert output.outputs[0] == expected
                continue
            stream = self.llm.stream([prompt], params)
            said: list[int] = []
            cancel_at = choose.choice([0, 2, 4, 100])
            for delta in stream:
                said += delta.token_ids
                if len(said) >= cancel_at:
                    stream.close()
            assert tuple(said) == expected.token_ids[: len(said)]
            assert cancel_at <= len(said) or tuple(said) == expected.token_ids
        return count


def test_answers_of_8_threads_are_those_of_a_lone_run(seed) -> None:
    Callers(seed).run(num_threads=8, num_requests=100)


@pytest.mark.nightly
def test_2000_answers_of_8_threads_with_cancels_are_those_of_a_lone_run(seed) -> None:
    Callers(seed, num_prompts=100).run(num_threads=8, num_requests=2000)


def test_a_thread_that_steps_without_end_lets_another_add_and_cancel(decoder, seed) -> None:
    engine = Engine(decoder, CONFIG)
    run(engine, prompts_of(seed, 5))
    done = threading.Event()

    def step() -> int:
        count = 0
        while not done.is_set():
            engine.step()
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        stepping = threads.submit(step)
        try:
            for _ in range(20):
                request = engine.add([1, 2, 3], GREEDY)
                engine.cancel(request.request_id)
        finally:
            done.set()
        assert stepping.result(timeout=60) > 0
    assert engine.num_unfinished == 0
