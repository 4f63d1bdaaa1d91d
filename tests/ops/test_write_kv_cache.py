"""Writing into the cache: the named slots and nothing else, quantised as the specification says, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from tests.ops.runner import IMPLEMENTATIONS
from tests.support import reference
from tests.support.attention_cases import DTYPES, to_torch

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 5, 4, 2, 8
SLOTS = [7, -1, 16, 4, -1, 19]

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def step(implementation: str, **options: Any) -> Any:
    return jax.jit(
        lambda key, value, cache, slots: ops.write_kv_cache(
            key, value, cache, slots, implementation=implementation, **options
        ),
        donate_argnums=2,
    )


def random_tokens(seed: int, dtype: str, count: int = len(SLOTS), spread: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    key, value = rng.normal(size=(2, count, HEADS, HEAD_SIZE)) * spread
    return key.astype(DTYPES[dtype]), value.astype(DTYPES[dtype])


def filled_cache(seed: int, dtype: str) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(1, 100, (NUM_BLOCKS, 2, BLOCK_SIZE, HEADS, HEAD_SIZE))
    return (bits / 8 if dtype != "int8" else bits).astype(DTYPES[dtype])


def written(implementation: str, key: np.ndarray, value: np.ndarray, cache: np.ndarray, **options: Any) -> np.ndarray:
    slots = jnp.array(SLOTS[: len(key)], jnp.int32)
    return np.asarray(step(implementation, **options)(jnp.array(key), jnp.array(value), jnp.array(cache), slots))


def expected(key: np.ndarray, value: np.ndarray, cache: np.ndarray, **options: Any) -> np.ndarray:
    result = to_torch(cache)
    slots = torch.tensor(SLOTS[: len(key)], dtype=torch.int32)
    reference.write_kv_cache(to_torch(key), to_torch(value), result, slots, **options)
    return result.view(torch.int8).numpy() if cache.itemsize == 1 else result.float().numpy()


def comparable(cache: np.ndarray) -> np.ndarray:
    return cache.view(np.int8) if cache.itemsize == 1 else cache.astype(np.float32)


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_keys_and_values_land_in_their_slots_and_nothing_else_changes(
    implementation: str, dtype: str, seed: int
) -> None:
    key, value = random_tokens(seed, dtype)
    cache = filled_cache(seed, dtype)
    actual = written(implementation, key, value, cache)
    assert np.array_equal(comparable(actual), expected(key, value, cache))


@each_implementation
@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.5, "v_scale": 3.0}], ids=["no scale", "scales"])
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_quantised_cache_holds_the_codes_of_the_specification(
    implementation: str, cache_dtype: str, scales: dict[str, float], seed: int
) -> None:
    key, value = random_tokens(seed, "float32", spread=20.0)
    cache = filled_cache(seed, cache_dtype)
    actual = written(implementation, key, value, cache, **scales)
    assert np.array_equal(comparable(actual), expected(key, value, cache, **scales))


@each_implementation
@pytest.mark.parametrize(("cache_dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("int8", 127)])
def test_a_quantised_cache_saturates_at_its_largest_value(
    implementation: str, cache_dtype: str, largest: float
) -> None:
    key = np.full((1, HEADS, HEAD_SIZE), 1e6, np.float32)
    actual = written(implementation, key, -key, filled_cache(0, cache_dtype))[1, :, 3].astype(np.float32)
    assert (actual[0] == largest).all()
    assert (actual[1] == -largest).all()


@each_implementation
def test_tokens_in_the_dtype_of_a_quantised_cache_are_stored_as_they_are(implementation: str) -> None:
    key, value = random_tokens(0, "float8_e4m3fn")
    cache = filled_cache(0, "float8_e4m3fn")
    actual = written(implementation, key, value, cache, k_scale=2.0, v_scale=2.0)
    assert np.array_equal(comparable(actual), expected(key, value, cache))


@each_implementation
def test_padding_alone_changes_nothing(implementation: str) -> None:
    cache = filled_cache(1, "float32")
    key, value = random_tokens(1, "float32", count=2)
    slots = jnp.array([-1, -1], jnp.int32)
    actual = step(implementation)(jnp.array(key), jnp.array(value), jnp.array(cache), slots)
    assert np.array_equal(np.asarray(actual), cache)


@each_implementation
def test_a_step_without_tokens_changes_nothing(implementation: str) -> None:
    cache = filled_cache(2, "float32")
    empty = jnp.zeros((0, HEADS, HEAD_SIZE))
    actual = step(implementation)(empty, empty, jnp.array(cache), jnp.zeros(0, jnp.int32))
    assert np.array_equal(np.asarray(actual), cache)


@each_implementation
def test_nan_in_padding_tokens_reaches_no_slot(implementation: str) -> None:
    key, value = random_tokens(3, "float32")
    for index, slot in enumerate(SLOTS):
        if slot < 0:
            key[index] = value[index] = np.nan
    assert np.isfinite(written(implementation, key, value, filled_cache(3, "float32"))).all()


@each_implementation
def test_a_donated_cache_is_written_in_place(implementation: str) -> None:
    key, value = (jnp.array(tokens) for tokens in random_tokens(4, "float32"))
    cache = jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, HEADS, HEAD_SIZE))
    before = cache.unsafe_buffer_pointer()
    after = step(implementation)(key, value, cache, jnp.array(SLOTS, jnp.int32))
    assert after.unsafe_buffer_pointer() == before
    assert cache.is_deleted()


@each_implementation
def test_the_write_needs_no_temporary_of_the_size_of_the_cache(implementation: str) -> None:
    tokens = jax.ShapeDtypeStruct((2, HEADS, HEAD_SIZE), jnp.float32)
    cache = jax.ShapeDtypeStruct((256, 2, BLOCK_SIZE, HEADS, HEAD_SIZE), jnp.float32)
    slots = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = step(implementation).lower(tokens, tokens, cache, slots).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.size * 4 / 8
    assert memory.alias_size_in_bytes == cache.size * 4
