"""MultiHeadAttention in its batch-invariant form: a padded batch has the bits of chunks and tokens over a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import AttentionMetadata, MultiHeadAttention, SequenceRow
from jattn.llm.models import set_batch_invariant


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    angles = positions.astype(jnp.float32)[None, :, None]
    return x * jnp.cos(angles) + x * x * jnp.sin(angles)


@pytest.mark.parametrize("options", [{"rope": rope}, {"normalize_qk": True}], ids=["rope", "norms"])
def test_a_training_pass_has_the_bits_of_chunks_and_tokens_over_a_cache(options, seed):
    layer = MultiHeadAttention(4, 32, num_kv_heads=2, decode=False, **options, rngs=nnx.Rngs(seed % 1000))
    set_batch_invariant(layer)
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((1, 20, 32)), jnp.float32)
    expected = np.asarray(nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, x))[0]

    step = nnx.jit(lambda layer, tokens, cache, metadata: layer(tokens, cache=cache, metadata=metadata))
    cache, done = jnp.full((7, 2, 4, 2, 8), jnp.nan), 0
    for count in (9, 1, 9, 1):
        metadata = AttentionMetadata.build([SequenceRow([3, 1, 5, 2, 4], done, count)], block_size=4, num_blocks=7)
        found, cache = step(layer, x[0, done : done + count], cache, metadata)
        np.testing.assert_array_equal(found, expected[done : done + count])
        done += count
