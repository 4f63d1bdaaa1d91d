"""Random arrivals, lengths, prefixes, cancels and lost pools, in pools too small for them: the lone run's answers."""

from __future__ import annotations

from typing import Any

import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.models import Decoder
from tests.engine.conftest import alternating_decoder, tiny_decoder
from tests.engine.test_interrupts import SIZES, Service, lose_pool_in

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefixes": {"enable_prefix_caching": False},
    "no overlap": {"steps_in_flight": 1},
    "prompts beside decoding": {"fixed_shapes": False},
    "shared prefixes": {"fixed_shapes": False, "enable_cascade_attention": True},
    "single steps": {"num_scheduler_steps": 1},
    "swap": {"num_host_blocks": 8},
    "draft model": {},
    "8 bits": {"kv_cache_dtype": "fp8"},
    "speculation": {"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "swap without overlap": {"num_host_blocks": 8, "steps_in_flight": 1},
    "scrub": {"scrub_on_free": True},
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 8},
    "small chunks": {"max_num_batched_tokens": 4},
    "window groups": {"num_blocks": 20},
    "window groups and swap": {"num_blocks": 20, "num_host_blocks": 16},
}


def chaos(config: str, decoder: Decoder, seed: int, *, num_requests: int) -> Engine:
    if config.startswith("window groups"):
        decoder = alternating_decoder(6, None)
    changes = CONFIGS[config]
    kv_cache_dtype = changes.get("kv_cache_dtype", "auto")
    lone = Engine(decoder, EngineConfig(**SIZES, disable_hybrid_kv_cache_manager=True, kv_cache_dtype=kv_cache_dtype))
    if config == "draft model":
        changes = {"speculative_config": {"num_speculative_tokens": 2, "model": tiny_decoder(num_hidden_layers=1)}}
    engine = Engine(decoder, EngineConfig(**(SIZES | changes)))
    service = Service(engine, lone, seed, temperature=0.7)
    while service.added < num_requests:
        for _ in range(60):
            service.act()
        lose_pool_in(engine, "run")
        # It needs a step of its own, so that the loss is behind us when the next one comes.
        service.add()
        service.drain()
        service.check()
    return engine


# Alike to others, which run every time; the thousand requests of every night have all.
_NIGHTLY = (
    "no prefixes",
    "no overlap",
    "single steps",
    "swap",
    "swap without overlap",
    "small chunks",
    "window groups",
    "scrub",
)
_NIGHTLY += ("prompts beside decoding", "scrub", "8 bits", "speculation", "one at a time")


@pytest.mark.parametrize("config", [name for name in CONFIGS if name not in _NIGHTLY])
def test_a_service_in_chaos_answers_as_a_lone_run_does(config, decoder, seed) -> None:
    engine = chaos(config, decoder, seed, num_requests=23)

    assert engine._core.device.pool.generation > 1


@pytest.mark.nightly
@pytest.mark.parametrize("config", CONFIGS)
def test_a_thousand_requests_in_chaos_are_answered_as_lone_ones_are(config, decoder, seed) -> None:
    chaos(config, decoder, seed, num_requests=1000)
