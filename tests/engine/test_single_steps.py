"""Which models decode one token for a program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from jattn.llm.engine import DataParallelEngine, Engine, EngineConfig, SamplingParams
from jattn.llm.engine.device import device
from jattn.llm.engine.device.placement import outlasts_the_host
from tests.engine.conftest import tiny_decoder
from tests.support.devices import on_four_devices


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


@pytest.mark.parametrize(
    ("number", "channel", "most"),
    [(None, None, 1), (8, None, 8), (None, SimpleNamespace(send=lambda *_: None), 4)],
    ids=["alone", "a number is given", "several processes"],
)
def test_a_large_model_decodes_one_token_for_a_program_unless(number, channel, most, monkeypatch):
    monkeypatch.setattr(device, "outlasts_the_host", lambda leaves: True)
    monkeypatch.setattr(device, "shared_channel", lambda *_, **__: channel)
    with Engine(tiny_decoder(), EngineConfig(num_blocks=9, num_scheduler_steps=number)) as engine:
        assert engine._core.device.num_scheduler_steps == most


@on_four_devices
def test_copies_of_a_large_model_decode_four_tokens_for_a_program():
    config = EngineConfig(num_blocks=9, data_parallel_size=2)
    with (
        mock.patch("jattn.llm.engine.device.device.outlasts_the_host", return_value=True),
        DataParallelEngine(tiny_decoder(), config) as engine,
    ):
        assert [each._core.device.num_scheduler_steps for each in engine.engines] == [4, 4]


def test_programs_of_several_tokens_are_neither_compiled_nor_run_where_one_token_is_better(monkeypatch):
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}
    found = {}
    for outlasts in (True, False):
        monkeypatch.setattr(device, "outlasts_the_host", lambda leaves, outlasts=outlasts: outlasts)
        with Engine(tiny_decoder(), EngineConfig(num_blocks=9, **sizes)) as engine:
            engine.warmup()
            engine.add([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
            while engine.num_unfinished:
                engine.step()
            found[outlasts] = [name for name in engine.programs if "4 steps" in name]
    assert found[False]
    assert not found[True]
