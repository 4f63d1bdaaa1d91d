"""Caches that are slices of one array: each is written in its place, whatever XLA makes of the slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, SIZE, TOKENS = 3, 4, 16, 2, 64, 5
IMPLEMENTATIONS = [
    "xla",
    "torch",
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("torch", marks=pytest.mark.gpu, id="torch on a GPU"),
]
SLOTS = jnp.array([17, 3, 40, 41, 63], jnp.int32)


def written(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    """One layer's rows, keys and values alike, in its cache."""
    return ops.write_kv_cache(rows, rows, caches, SLOTS, implementation=implementation)


def by_scan(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    return jax.lax.scan(lambda _, one: (None, written(*one, implementation)), None, (caches, rows))[1]


def by_scan_that_reads_too(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    def layer(total: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cache = written(*one, implementation)
        return total + cache[0, 0], cache

    return jax.lax.scan(layer, jnp.zeros((BLOCK_SIZE, HEADS, SIZE)), (caches, rows))[1]


def by_index(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    for layer in range(LAYERS):
        caches = caches.at[layer].set(written(caches[layer], rows[layer], implementation))
    return caches


def by_vmap(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    return jax.vmap(lambda cache, one: written(cache, one, implementation))(caches, rows)


def by_vmap_over_rows(caches: jax.Array, rows: jax.Array, implementation: str) -> jax.Array:
    return jax.vmap(lambda one: written(caches[0], one, implementation))(rows)


@pytest.mark.parametrize("donates", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("way", [by_scan, by_scan_that_reads_too, by_index, by_vmap, by_vmap_over_rows])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_slice_is_written_in_its_place_and_no_array_that_was_not_donated(
    implementation: str, way: Callable[..., Any], donates: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = rng.normal(size=(LAYERS, BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE)).astype(np.float32)
    rows = rng.normal(size=(LAYERS, TOKENS, HEADS, SIZE)).astype(np.float32)
    expected = np.stack([before[0]] * LAYERS) if way is by_vmap_over_rows else before.copy()
    for layer in range(LAYERS):
        for token, slot in enumerate(SLOTS.tolist()):
            expected[layer, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rows[layer, token]
    # A copy: XLA on a CPU takes numpy's own memory for an array.
    caches = jnp.array(before)
    step = jax.jit(way, static_argnums=2, donate_argnums=0 if donates else ())
    assert np.array_equal(step(caches, jnp.asarray(rows), implementation), expected)
    assert donates or np.array_equal(caches, before)
