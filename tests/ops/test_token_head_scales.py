"""Scales per token and head: written and read as the specification says, on every implementation that has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jattn import ops
from tests.support import reference
from tests.support.attention_cases import DTYPES, to_torch
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import AttentionSpec

NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 9, 4, 4, 2, 16
SLOTS = [*range(4, 13), -1]
QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")

each_implementation = pytest.mark.parametrize(
    "implementation",
    ["xla", "torch", pytest.param("triton", marks=pytest.mark.gpu)],
)


def random_tokens(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Rows of very different size: one scale for all of them would lose the small ones.
    sizes = 10.0 ** rng.integers(-2, 3, (2, len(SLOTS), KV_HEADS, 1))
    key, value = (rng.normal(size=(2, len(SLOTS), KV_HEADS, SIZE)) * sizes).astype(np.float32)
    # A row of zeros has no largest element to scale by.
    key[0] = 0
    return key, value


def empty_caches(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cache = np.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, SIZE), DTYPES[dtype])
    # What nobody wrote must not be read.
    scales = np.full((2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS), np.nan, np.float32)
    return cache, scales[0], scales[1]


def written(implementation: str, key: np.ndarray, value: np.ndarray, dtype: str) -> tuple[jax.Array, ...]:
    step = jax.jit(
        lambda caches, key, value, slots: ops.write_kv_cache_per_token_head(
            key, value, caches[0], caches[1], caches[2], slots, implementation=implementation
        ),
        donate_argnums=0,
    )
    caches = tuple(map(jnp.array, empty_caches(dtype)))
    return step(caches, jnp.array(key), jnp.array(value), jnp.array(SLOTS, jnp.int32))


def written_by_reference(key: np.ndarray, value: np.ndarray, dtype: str) -> tuple[torch.Tensor, ...]:
    cache, k_scales, v_scales = map(to_torch, empty_caches(dtype))
    reference.write_kv_cache(
        to_torch(key),
        to_torch(value),
        cache,
        torch.tensor(SLOTS, dtype=torch.int32),
        k_scale_cache=k_scales,
        v_scale_cache=v_scales,
    )
    return cache, k_scales, v_scales


@each_implementation
@pytest.mark.parametrize("dtype", QUANTISED)
def test_each_row_is_stored_with_the_scale_of_its_largest_element(implementation, dtype, seed) -> None:
    key, value = random_tokens(seed)

    cache, *scales = written(implementation, key, value, dtype)
    expected, *expected_scales = written_by_reference(key, value, dtype)

    for found, wanted in zip(scales, expected_scales, strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted.numpy(), rtol=2e-7)
    # A scale that differs in its last bit can move an element that lies between two codes to the other one.
    codes = np.asarray(cache).view(np.int8).astype(int) - expected.view(torch.int8).numpy().astype(int)
    assert np.abs(codes).max() <= 1
    assert (codes != 0).mean() < 0.01


@each_implementation
@pytest.mark.parametrize("dtype", QUANTISED)
def test_attention_reads_every_row_with_its_own_scale(implementation, dtype, seed) -> None:
    key, value = random_tokens(seed)
    cache, k_scales, v_scales = written_by_reference(key, value, dtype)
    query = np.random.default_rng(seed + 1).normal(size=(3, HEADS, SIZE)).astype(np.float32)
    metadata = {
        "block_tables": np.array([[1, 2, 3, 0]], np.int32),
        "seq_lens": np.array([9], np.int32),
        "query_start_loc": np.array([0, 3], np.int32),
    }
    exact, _ = reference.paged_attention_with_lse(
        torch.from_numpy(query),
        cache,
        *map(torch.from_numpy, metadata.values()),
        spec=AttentionSpec(scale=SIZE**-0.5),
        k_scale_cache=k_scales,
        v_scale_cache=v_scales,
        compute_dtype=torch.float64,
    )
    single, _ = reference.paged_attention_with_lse(
        torch.from_numpy(query),
        cache,
        *map(torch.from_numpy, metadata.values()),
        spec=AttentionSpec(scale=SIZE**-0.5),
        k_scale_cache=k_scales,
        v_scale_cache=v_scales,
        compute_dtype=torch.float32,
    )

    found = ops.paged_attention(
        jnp.array(query),
        jnp.array(cache.view(torch.uint8).numpy().view(DTYPES[dtype])),
        *map(jnp.array, metadata.values()),
        max_query_len=3,
        k_scale_cache=jnp.array(k_scales.numpy()),
        v_scale_cache=jnp.array(v_scales.numpy()),
        implementation=implementation,
    )

    # The tensor cores of CUDA multiply float32 as TF32, with 10 bits of mantissa.
    unit = np.finfo(np.float32).eps if implementation == "xla" and jax.default_backend() == "cpu" else 2.0**-10
    allowed = 2 * ((single - exact).abs().max().item() + unit * exact.abs().max().item())
    assert np.abs(np.asarray(found) - exact.numpy()).max() <= allowed


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": jnp.ones((1, HEADS, SIZE)),
        "kv_cache": jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, SIZE), jnp.int8),
        "block_tables": jnp.ones((1, 2), jnp.int32),
        "seq_lens": jnp.ones(1, jnp.int32),
        "query_start_loc": jnp.arange(2, dtype=jnp.int32),
        "max_query_len": 1,
        "k_scale_cache": jnp.ones((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS)),
        "v_scale_cache": jnp.ones((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS)),
        "implementation": "xla",
    }
    return ops.paged_attention(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_scale_cache": None}, "k_scale_cache and v_scale_cache go together; give both or none."),
        ({"k_scale": 0.5}, "k_scale or v_scale is given beside k_scale_cache and v_scale_cache; pass one kind."),
        (
            {"kv_cache": jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, SIZE))},
            "the cache is float32; scales per token and head need int8 or fp8.",
        ),
        (
            {"k_scale_cache": jnp.ones((NUM_BLOCKS, BLOCK_SIZE, HEADS))},
            (
                "k_scale_cache has shape [9, 4, 4]; it must be [num_blocks, block_size, num_kv_heads] with "
                "num_kv_heads = 2, that of kv_cache."
            ),
        ),
    ],
)
def test_scale_caches_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises((InvalidInput, Unsupported)) as error:
        call(**changes)

    assert str(error.value) == message


def test_a_row_that_is_quantised_already_has_no_scale_to_find() -> None:
    key = jnp.ones((1, KV_HEADS, SIZE), jnp.int8)
    cache, k_scales, v_scales = map(jnp.array, empty_caches("int8"))

    with pytest.raises(InvalidInput, match=r"key is int8 and the cache int8; give .* to be quantised"):
        ops.write_kv_cache_per_token_head(key, key, cache, k_scales, v_scales, jnp.ones(1, jnp.int32))
