"""Sizes that nobody named: the memory of an engine's pool, and the rows and tokens of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jattn.llm.engine import Engine, EngineConfig
from jattn.llm.engine.device import device as engine_device
from jattn.llm.models import Decoder
from torch_core.base.errors import InvalidInput, Unsupported

# Of the session's decoder: two layers of keys and values, two heads of 8 float32, blocks of 4 tokens.
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4
SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 64}


def reports(free: int) -> Any:
    return lambda device: free


def num_blocks(decoder: Decoder, **settings: Any) -> int:
    with Engine(decoder, EngineConfig(**SIZES, **settings)) as engine:
        return engine.cache_stats().num_blocks


def test_nine_tenths_of_what_is_free_are_the_pools(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_device, "free_bytes", reports(1000 * BLOCK_BYTES))
    assert num_blocks(decoder) == 900


def test_no_more_is_taken_than_all_sequences_can_fill(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_device, "free_bytes", reports(1 << 40))
    assert num_blocks(decoder) == 64 * 128 // 4 + 1


def test_a_given_size_is_not_compared_with_what_is_free(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_device, "free_bytes", reports(1))
    assert num_blocks(decoder, kv_cache_bytes=100 * BLOCK_BYTES) == 100


def test_a_device_without_room_for_one_sequence_is_refused_with_the_bytes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_device, "free_bytes", reports(10 * BLOCK_BYTES))
    with pytest.raises(InvalidInput, match=r"^the budget of 9,216 bytes holds 9 blocks; a sequence of 128 tokens"):
        num_blocks(decoder)


def test_the_least_of_several_devices_counts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1000 * BLOCK_BYTES, 500 * BLOCK_BYTES]
    config = EngineConfig(**SIZES)
    devices = [SimpleNamespace(process_index=jax.process_index(), free=free) for free in left]
    monkeypatch.setattr(engine_device, "free_bytes", lambda device: device.free)
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=devices))
    assert engine_device.pool_budget(config, mesh) == 450 * BLOCK_BYTES


@pytest.mark.parametrize("why", ["it does not report", "it is another process's"])
def test_a_device_that_says_nothing_gives_a_gibibyte(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> int:
        raise Unsupported("no memory is reported")

    other = why != "it does not report"
    monkeypatch.setattr(engine_device, "free_bytes", reports(5) if other else refuse)
    device = SimpleNamespace(process_index=jax.process_index() + other)
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    assert engine_device.pool_budget(EngineConfig(), mesh) == 1 << 30


@pytest.mark.parametrize(("backend", "sizes"), [("cpu", (8, 512)), ("gpu", (64, 2048))])
def test_without_a_config_a_gpu_gets_the_sizes_of_a_server(
    backend: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = engine_device.default_config()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == sizes
