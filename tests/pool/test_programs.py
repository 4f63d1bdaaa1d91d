"""Which program copies blocks, and that the torch core's kernel does what plain jnp does."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from jattn.bridge import native
from jattn.pool import KVPool, programs
from torch_core.base.specs import KVCacheSpec


def chosen(pairs: list[tuple[int, int]], platform: str = "gpu") -> tuple[object, list[list[int]]]:
    program, padded = programs.copy_program(types.SimpleNamespace(platform=platform), np.array(pairs, np.int32))
    return program, padded.tolist()


def test_cuda_copies_by_the_torch_cores_kernel_and_skips_the_padding(monkeypatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: None)

    assert chosen([(1, 4), (2, 5), (1, 6)]) == (programs.copy_blocks_native, [[1, 4], [2, 5], [1, 6], [-1, -1]])


def test_a_block_that_is_read_and_written_is_copied_in_order(monkeypatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: None)

    assert chosen([(1, 2), (2, 3), (4, 5)]) == (programs.copy_blocks, [[1, 2], [2, 3], [4, 5], [0, 0]])


def test_without_cuda_or_without_the_launcher_plain_jnp_copies(monkeypatch) -> None:
    assert chosen([(1, 2)], "cpu")[0] is programs.copy_blocks
    monkeypatch.setattr(native, "why_not", lambda: "jaxlib is too old")
    assert chosen([(1, 2)])[0] is programs.copy_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("pairs", [[(1, 5)], [(1, 5), (2, 6), (1, 7)], [(1, 2), (2, 3)]])
def test_the_kernel_copies_what_jnp_copies_and_leaves_the_rest(dtype, pairs, seed) -> None:
    pool = KVPool(KVCacheSpec(num_kv_heads=2, head_size=64, block_size=16, dtype=dtype), num_layers=2, num_blocks=9)
    rng = np.random.default_rng(seed)
    shape = (9, 2, 16, 2, 64)
    before = [rng.normal(size=shape).astype(pool.read_blocks([0])[0].dtype) for _ in range(2)]
    pool.write_blocks(list(range(9)), before)
    addresses = pool.addresses()

    pool.copy_blocks(pairs)

    for layer, found in zip(before, pool.read_blocks(list(range(9))), strict=True):
        expected = layer.copy()
        expected[[target for _, target in pairs]] = layer[[source for source, _ in pairs]]
        assert np.array_equal(found[1:].view(np.uint8), expected[1:].view(np.uint8))
    assert pool.addresses() == addresses


@pytest.mark.gpu
def test_copies_on_cuda_run_the_native_call() -> None:
    cache = jax.ShapeDtypeStruct((8, 2, 16, 2, 64), np.float32)
    lowered = programs.copy_blocks_native.lower((cache,), jax.ShapeDtypeStruct((2, 2), np.int32))

    assert native.TARGET in lowered.as_text()
