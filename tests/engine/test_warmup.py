"""After `warmup` nothing compiles any more, whatever the traffic: by the engine's counter and by JAX's own events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jattn.engine import Engine, EngineConfig, SamplingParams
from jattn.engine.progress import progress
from tests.engine.conftest import tiny_decoder
from tests.engine.test_engine import prompts_of, run

SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_scheduler_steps": 2}
KINDS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"top_p": 0.5})


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of JAX's events of compiling, as they come."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def serve_anything(engine: Engine, seed: int) -> None:
    generator = random.Random(seed)
    for round_ in range(12):
        prompts = prompts_of(seed + round_, *(generator.randrange(1, 40) for _ in range(generator.randrange(1, 7))))
        for prompt in prompts:
            count = generator.randrange(1, 9)
            engine.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, **generator.choice(KINDS)))
            for _ in range(generator.randrange(3)):
                engine.step()
        while engine.num_unfinished:
            engine.step()


def test_nothing_compiles_after_the_warm_up_whatever_comes(compiled, seed) -> None:
    engine = Engine(tiny_decoder(intermediate_size=48), EngineConfig(**SIZES))
    told: list[tuple[int, int]] = []
    engine.warmup(lambda done, total, name: told.append((done, total)))
    # The transfers and slices around the programs are compiled by their first use.
    run(engine, prompts_of(seed, 3))
    before = engine.num_compilations
    compiled.clear()

    serve_anything(engine, seed)

    assert (engine.num_compilations, compiled) == (before, [])
    # Prefill, and decoding of 1 and of 2 tokens for 1 and for 4 sequences; three kinds of sampling each.
    assert told == [(done, 15) for done in range(1, 16)]
    assert before == len(engine.programs) == 15


def test_a_second_warm_up_has_nothing_to_do(decoder) -> None:
    config = EngineConfig(**(SIZES | {"max_num_seqs": 1, "num_scheduler_steps": 1}))
    engine = Engine(decoder, config)
    engine.warmup()
    told: list[Any] = []

    engine.warmup(lambda *news: told.append(news))

    assert told == []
    assert Engine(decoder, config).num_compilations == 0


def test_without_a_terminal_the_progress_is_silent(capsys) -> None:
    with progress(None) as tell:
        tell(1, 2, "a program")

    assert capsys.readouterr() == ("", "")
