"""After `warmup` nothing compiles any more, whatever the traffic: by the engine's counter and by JAX's own events."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jattn.llm.engine import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from jattn.llm.engine.benchmark_fill import assume_computed
from jattn.llm.engine.device import programs as engine_programs
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.programs import Programs, progress
from jattn.llm.load import TextTokenizer
from jattn.llm.models import Decoder
from tests.engine.conftest import greedy_kind, tiny_decoder
from tests.engine.cores import CoreEngine
from tests.engine.test_engine import prompts_of, run
from tests.support.compilation_cache import programs_kept_in
from tests.support.tiny_models import byte_tokenizer

SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_scheduler_steps": 1,
    "enable_cascade_attention": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"top_p": 0.5, "presence_penalty": 0.5},
    {"prompt_logprobs": 2, "logprobs": 1, "logit_bias": {3: 1.0}, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 4},
    {"prompt_logprobs": -1, "n": 2, "min_tokens": 1, "allowed_token_ids": [1, 2, 3], "frequency_penalty": 0.1},
    {"bad_words": ["ab"], "stop_token_ids": [5], "structured_outputs": StructuredOutputsParams(regex="[ab]+")},
)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of JAX's events of compiling, as they come."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def speaker() -> Decoder:
    """A decoder of bytes."""
    return tiny_decoder(intermediate_size=48, vocab_size=257, num_hidden_layers=1, eos_token_ids=(0,))


def serve_anything(engine: Engine, seed: int) -> None:
    generator = random.Random(seed)
    for round_ in range(7):
        prompts = prompts_of(seed + round_, *(generator.randrange(1, 40) for _ in range(generator.randrange(1, 7))))
        for prompt in prompts:
            count = generator.randrange(1, 9)
            engine.add(prompt, SamplingParams(**{"max_tokens": count, "ignore_eos": True} | generator.choice(KINDS)))
            for _ in range(generator.randrange(3)):
                engine.step()
        while engine.num_unfinished:
            engine.step()


def test_nothing_compiles_after_the_warm_up_whatever_comes_nor_in_another_one(compiled, seed) -> None:
    engine = Engine(speaker(), EngineConfig(**SIZES), tokenizer=TextTokenizer(byte_tokenizer()))
    told: list[tuple[int, int]] = []
    engine.warmup(lambda done, total, name: told.append((done, total)))
    # The transfers and slices around the programs are compiled by their first use.
    run(engine, prompts_of(seed, 3))
    before = engine.num_compilations
    compiled.clear()

    serve_anything(engine, seed)

    assert (engine.num_compilations, compiled) == (before, [])
    # Prefill, and decoding of 1 and of 4 sequences; two kinds of sampling each, and a third on a GPU.
    count = 6 if greedy_kind() == "plain" else 9
    assert told == [(done, count) for done in range(1, count + 1)]
    assert before == len(engine.programs) == count
    engine.warmup(lambda *news: told.append(news[:2]))
    assert len(told) == count
    assert Engine(speaker(), EngineConfig(**SIZES)).num_compilations == 0


def test_two_programs_are_traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together, trace = threading.Barrier(2, timeout=60), Programs._traced  # pyright: ignore[reportPrivateUsage]

    def traced(self: Programs, bucket: Bucket) -> Any:
        together.wait()
        return trace(self, bucket)

    monkeypatch.setattr(Programs, "_traced", traced)
    engine = Engine(speaker(), EngineConfig(**SIZES, num_blocks=31))
    engine.warmup(wanted=lambda name: "queries up to 1, plain" in name)

    assert len(engine.programs) == 2


def test_a_new_engine_lends_its_pool_to_the_warm_up(monkeypatch: pytest.MonkeyPatch, seed) -> None:
    closed: list[bool] = []

    def watched(self: Programs, *args: Any) -> None:
        closed.append(engine._core.device.pool.is_closed)
        compile_all(self, *args)

    compile_all = Programs.compile
    monkeypatch.setattr(Programs, "compile", watched)
    engine: Any = CoreEngine(speaker(), EngineConfig(**SIZES, num_blocks=33))
    # As on a GPU.
    engine._core.device.runner.programs.tuning_bytes = 1
    monkeypatch.setattr(engine_programs, "free_bytes", lambda _: 1)
    engine._core.warmup(lambda *_: None, None)
    answers = run(engine, prompts_of(seed, 3, 9))
    engine._core.warmup(lambda *_: None, None)

    # With the pool the programs around the steps; what is cached stays.
    assert closed == [True, False, False]
    assert engine.cache_stats().cached > 0
    # Programs of its own: another test counts those of the plain sizes.
    assert answers == run(Engine(speaker(), EngineConfig(**SIZES, num_blocks=39)), prompts_of(seed, 3, 9))


def test_a_warm_up_keeps_a_pool_that_holds_prompts_or_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_programs, "free_bytes", lambda _: 1)
    engine: Any = CoreEngine(speaker(), EngineConfig(**SIZES, num_blocks=35, scrub_on_free=True))
    assume_computed(engine._core, [list(range(40))])
    cached, pool = engine.cache_stats().cached, engine._core.device.pool
    engine._core.device.runner.programs.tuning_bytes = 1
    engine._core.warmup(lambda *_: None, lambda _: False)
    assert (engine.cache_stats().cached, pool.generation) == (cached, 1)

    engine = CoreEngine(speaker(), EngineConfig(**SIZES, num_blocks=35, scrub_on_free=True))
    engine._core.warmup(lambda *_: None, lambda _: False)
    assert engine.cache_stats().cached == 0
    assert engine._core.device.pool.generation == 1


def test_an_interrupted_warm_up_begins_no_further_program(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Bucket] = []

    def interrupted(*_: Any) -> None:
        raise InterruptedError

    def watched(self: Programs, lowered: Any, bucket: Bucket) -> Any:
        begun.append(bucket)
        return compile_one(self, lowered, bucket)

    compile_one = Programs._compile  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Programs, "_compile", watched)
    engine: Any = CoreEngine(speaker(), EngineConfig(**SIZES, num_blocks=37))
    # One at a time, as where the memory has room for one.
    monkeypatch.setattr(Programs, "num_compilers", lambda _: 1)
    with pytest.raises(InterruptedError):
        engine._core.warmup(interrupted, lambda name: "plain" in name)
    assert len(begun) < sum("plain" in str(bucket) for bucket in engine._core.device.runner.buckets.all())


@pytest.mark.nightly
def test_swaps_scrubs_and_their_sizes_are_warm_too(compiled, seed) -> None:
    sizes: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": 12, "scrub_on_free": True, "fixed_shapes": True}
    engine = Engine(tiny_decoder(intermediate_size=48), EngineConfig(**(SIZES | sizes)))
    engine.warmup()
    run(engine, prompts_of(seed, 3))
    compiled.clear()

    for round_ in range(4):
        run(engine, prompts_of(seed + round_, 20, 2, 9, 14))

    assert engine.cache_stats().swapped_in > 0
    assert compiled == []


@pytest.mark.nightly
def test_programs_come_back_from_jaxs_persistent_cache(tmp_path) -> None:
    hits: list[str] = []
    sizes: dict[str, Any] = SIZES | {"max_num_seqs": 1}
    model: dict[str, Any] = {"implementation": "xla", "num_hidden_layers": 1}
    config = EngineConfig(**sizes)

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        with programs_kept_in(tmp_path):
            Engine(tiny_decoder(**model), config).warmup()
            assert hits == []
            # Another model, of the same programs: as another process is.
            engine = Engine(tiny_decoder(**model, eos_token_ids=(1,)), config)
            engine.warmup()
    finally:
        jax.monitoring.unregister_event_listener(listen)

    assert len(hits) >= engine.num_compilations == (4 if greedy_kind() == "plain" else 6)


def test_without_a_terminal_the_progress_is_silent(capsys) -> None:
    with progress(None) as tell:
        tell(1, 2, "a program")

    assert capsys.readouterr() == ("", "")
