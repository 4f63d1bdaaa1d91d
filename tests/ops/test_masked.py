"""masked_attention: masks and biases of fewer axes than scores, lengths of any type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import ops


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_a_mask_and_a_bias_are_broadcast_as_numpy_does(num_axes, num_kv_heads, seed):
    # As many heads as tokens: axes that change places still fit.
    keys = jax.random.split(jax.random.key(seed), 5)
    query, key, value = (
        jax.random.normal(x, (4, 4, heads, 8)) for x, heads in zip(keys, (4, num_kv_heads, num_kv_heads), strict=False)
    )
    mask = jax.random.bernoulli(keys[3], 0.7, (4,) * num_axes)
    bias = jax.random.normal(keys[4], (4,) * num_axes)

    found = ops.masked_attention(query, key, value, mask=mask, bias=bias, causal=False)

    whole = (jnp.broadcast_to(x, (4, 4, 4, 4)) for x in (mask, bias))
    expected = ops.masked_attention(query, key, value, **dict(zip(("mask", "bias"), whole, strict=True)), causal=False)
    np.testing.assert_array_equal(found, expected)


def test_lengths_without_a_sign_are_aligned_as_all_others(seed):
    query, key = jax.random.normal(jax.random.key(seed), (2, 2, 4, 1, 8))
    # More queries than keys: the first ones are at positions before the first key.
    plain, found = (
        ops.masked_attention(
            query, key, key, query_lens=jnp.array([4, 3], dtype), key_lens=jnp.array([2, 4], dtype), causal=True
        )
        for dtype in (jnp.int32, jnp.uint8)
    )
    np.testing.assert_array_equal(found, plain)
