"""Sizes that nobody named: the memory of an engine's pool, and the rows and tokens of a step."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jattn.llm.engine import LLM, Engine, EngineConfig
from jattn.llm.engine.clients import engine as engine_client
from jattn.llm.engine.clients import llm as llm_client
from jattn.llm.engine.device import device as engine_device
from jattn.llm.engine.device import programs as engine_programs
from jattn.llm.engine.device.buckets import Bucket
from jattn.llm.engine.device.programs import Programs
from jattn.llm.engine.options import defaults
from jattn.llm.engine.options.defaults import default_config
from jattn.llm.engine.options.params import SamplingKind
from jattn.llm.models import Decoder
from jattn.pool import kv_pool
from tests.engine.cores import CoreEngine
from torch_core.base.errors import InvalidInput, OutOfMemory, Unsupported

# Of the session's decoder: two layers of keys and values, two heads of 8 float32, blocks of 4 tokens.
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4
SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 64}


def reports(free: int) -> Any:
    return lambda device: free


def num_blocks(decoder: Decoder, **settings: Any) -> int:
    with Engine(decoder, EngineConfig(**SIZES, **settings)) as engine:
        return engine.cache_stats().num_blocks


def test_the_pool_leaves_room_for_the_largest_step(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Bucket] = []

    def step_bytes(self: Programs, bucket: Bucket) -> int:
        asked.append(bucket)
        return 300 * BLOCK_BYTES

    monkeypatch.setattr(engine_device, "free_bytes", reports(1000 * BLOCK_BYTES))
    monkeypatch.setattr(Programs, "step_bytes", step_bytes)
    assert num_blocks(decoder) == 970 - 300
    (bucket,) = asked
    assert (bucket.num_seqs, bucket.num_tokens, bucket.sampler.kind) == (64, 512, SamplingKind.FULL)


def test_the_pool_leaves_room_to_compare_kernels(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_device, "free_bytes", reports(1000 * BLOCK_BYTES))
    monkeypatch.setattr(Programs, "step_bytes", lambda *_: 300 * BLOCK_BYTES)
    monkeypatch.setattr(Programs, "tuning_bytes", property(lambda _: 200 * BLOCK_BYTES, lambda *_: None), raising=False)
    assert num_blocks(decoder) == 1000 - 200 - 300


@pytest.mark.parametrize(
    ("shape", "num_tokens", "taken"),
    [
        ((1024, 1024), 2048, 110),
        ((1024, 1024), 8192, 146),
        ((1024, 4096), 8192, 248),
        ((1024, 16384), 8192, 656),
        ((4096, 28672), 8192, 1280),
        # Its rows are those of sequences.
        ((4096, 128256), 8192, 1002),
    ],
)
def test_comparing_kernels_takes_what_xla_took_on_an_h100(shape: tuple[int, int], num_tokens: int, taken: int) -> None:
    weight: Any = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert taken <= engine_programs.tuning_bytes(weight, num_tokens, 128256) / 2**20 <= taken + 128


@pytest.mark.parametrize(("room", "most"), [(0, 1), (2.5, 2), (1000, 16)])
def test_no_more_programs_are_compiled_at_once_than_the_memory_holds_their_kernels(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, room: float, most: int
) -> None:
    programs = CoreEngine(decoder, EngineConfig(**SIZES, num_blocks=32))._core.device.runner.programs  # pyright: ignore[reportPrivateUsage]
    assert programs.tuning_bytes == 0
    assert programs.num_compilers() == min(os.cpu_count() or 1, 16)
    monkeypatch.setattr(programs, "tuning_bytes", 1 << 20)
    monkeypatch.setattr(engine_programs, "free_bytes", reports(int(room * (1 << 20))))
    monkeypatch.setattr(engine_programs.os, "cpu_count", lambda: 64)
    assert programs.num_compilers() == most


@pytest.mark.parametrize(
    ("room", "asked"),
    [([640, 640], [670, 586, 586]), ([670, 600], [670, 670, 586, 586]), ([300, 300], [670, 586, 512, 448])],
    ids=["no array has room", "one of two has", "never"],
)
def test_where_the_memory_is_in_pieces_the_pool_is_smaller(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, room: list[int], asked: list[int]
) -> None:
    found: list[int] = []

    def wait(array: Any) -> Any:
        # The two arrays of the step that is measured are small.
        if len(array) > 2:
            found.append(len(array))
            if len(array) > room[1 if found[-2:] == [len(array)] * 2 else 0]:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return array

    monkeypatch.setattr(engine_device, "free_bytes", reports(1000 * BLOCK_BYTES))
    monkeypatch.setattr(Programs, "step_bytes", lambda *_: 300 * BLOCK_BYTES)
    monkeypatch.setattr(kv_pool.jax, "block_until_ready", wait)
    if asked[-1] == asked[-2]:
        assert num_blocks(decoder) == asked[-1]
    else:
        with pytest.raises(OutOfMemory):
            num_blocks(decoder)
    # After an array without room no other one is asked for: a GPU takes ten seconds for each.
    assert found == asked


def test_a_step_is_measured_by_the_compiler(decoder: Decoder) -> None:
    config = EngineConfig(**SIZES, max_model_len=64, num_blocks=32)
    runner = CoreEngine(decoder, config)._core.device.runner  # pyright: ignore[reportPrivateUsage]
    # The logits of a full batch are among the arrays of a step.
    assert 64 * decoder.config.vocab_size * 4 <= runner.step_bytes() < 1 << 28


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
    with pytest.raises(InvalidInput, match=r"^the budget of 9,932 bytes holds 9 blocks; a sequence of 128 tokens"):
        num_blocks(decoder)


def test_the_least_of_several_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(process_index=jax.process_index(), free=free) for free in (1000, 500)]
    monkeypatch.setattr(engine_device, "free_bytes", lambda device: device.free)
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=devices))
    assert engine_device.free_memory(EngineConfig(**SIZES), mesh) == 500


@pytest.mark.parametrize("why", ["it does not report", "it is another process's"])
def test_a_device_that_says_nothing_is_not_asked_further(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> int:
        raise Unsupported("no memory is reported")

    other = why != "it does not report"
    monkeypatch.setattr(engine_device, "free_bytes", reports(5) if other else refuse)
    device = SimpleNamespace(process_index=jax.process_index() + other)
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    assert engine_device.free_memory(EngineConfig(), mesh) is None


@pytest.mark.parametrize(
    ("backend", "limit", "sizes"),
    [("cpu", None, (8, 512)), ("gpu", 47 << 30, (64, 2048)), ("gpu", 59 << 30, (256, 8192))],
)
def test_without_a_config_a_gpu_gets_the_sizes_of_a_server_by_its_memory(
    backend: str, limit: int | None, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = None if limit is None else {"bytes_limit": limit}
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    config = default_config()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == sizes


@pytest.mark.parametrize(
    ("limit", "weights", "options", "tokens"),
    [
        (59 << 30, 0, {}, 8192),
        (59 << 30, 1 << 40, {}, 16384),
        (59 << 30, 1 << 40, {"fixed_shapes": True}, 8192),
        (59 << 30, 1 << 40, {"max_num_batched_tokens": 300}, 300),
        (47 << 30, 1 << 40, {}, 2048),
    ],
)
def test_a_small_model_on_a_large_gpu_has_longer_steps(
    decoder: Decoder, limit: int, weights: int, options: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "SMALL_MODEL_BYTES", weights)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit})])
    assert default_config(decoder, **options).max_num_batched_tokens == tokens


@pytest.mark.parametrize("options", [{}, {"num_blocks": 9}])
def test_an_llm_has_the_sizes_of_its_model(
    decoder: Decoder, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sized(model: Any = None, **given: Any) -> EngineConfig:
        return EngineConfig(**given, max_model_len=9 if model is decoder else None)

    for module in (engine_client, llm_client):
        monkeypatch.setattr(module, "default_config", sized)
    with LLM(decoder, **options) as llm:
        assert llm.max_model_len == 9
