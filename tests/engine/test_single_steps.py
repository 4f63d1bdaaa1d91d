"""Which models decode one token for a program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import jattn.engine.device
from jattn.engine import Engine, EngineConfig
from jattn.engine.device import outlasts_the_host
from tests.engine.conftest import tiny_decoder


def weights(num_bytes: int, platform: str, parts: int = 1) -> Any:
    return SimpleNamespace(
        shape=(num_bytes // 2,),
        dtype=jnp.dtype("bfloat16"),
        devices=lambda: [SimpleNamespace(platform=platform)],
        sharding=SimpleNamespace(shard_shape=lambda shape: (shape[0] // parts,)),
    )


@pytest.mark.parametrize(
    ("num_bytes", "platform", "parts", "expected"),
    [
        (16 << 30, "gpu", 1, True),
        (16 << 30, "gpu", 8, False),
        (16 << 30, "cpu", 1, False),
        (1 << 30, "gpu", 1, False),
    ],
    ids=["a large model", "cut small", "on a CPU", "a small model"],
)
def test_a_model_that_takes_longer_than_the_host_decodes_token_by_token(num_bytes, platform, parts, expected):
    assert outlasts_the_host([weights(num_bytes // 2, platform, parts)] * 2) is expected


@pytest.mark.parametrize(
    ("sizes", "most"),
    [({}, 4), ({"max_num_batched_tokens": 2, "max_num_seqs": 1}, 2), ({"num_scheduler_steps": 8}, 8)],
)
def test_a_program_decodes_four_tokens_unless_a_number_is_given(sizes, most):
    assert EngineConfig(**sizes).most_scheduler_steps == most


def test_warmup_compiles_no_program_of_several_tokens_where_none_runs(monkeypatch):
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}
    found = {}
    for outlasts in (True, False):
        monkeypatch.setattr(jattn.engine.device, "outlasts_the_host", lambda leaves, outlasts=outlasts: outlasts)
        with Engine(tiny_decoder(), EngineConfig(num_blocks=9, **sizes)) as engine:
            engine.warmup()
            found[outlasts] = [name for name in engine.programs if "4 steps" in name]
    assert found[False]
    assert not found[True]
