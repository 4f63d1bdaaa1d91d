"""Seeds of dropout from a JAX key."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout_seeds(rng: jax.Array, num_seqs: int, num_heads: int, *, broadcast: bool = False) -> jax.Array:
    """Draws the `dropout_seeds` of `attention`.

    Args:
        rng: a JAX key, of either kind.
        num_seqs: number of sequences of the batch.
        num_heads: number of query heads.
        broadcast: whether all sequences and heads drop the same weights, by query and key (flax's `broadcast_dropout`).

    Returns:
        int32[num_seqs, num_heads, 2].

    Example:
        >>> dropout_seeds(jax.random.key(0), 3, 4).shape
        (3, 4, 2)
    """
    bits = jax.random.bits(rng, (1, 1, 2) if broadcast else (num_seqs, num_heads, 2), jnp.uint32)
    return jnp.broadcast_to(jax.lax.bitcast_convert_type(bits, jnp.int32), (num_seqs, num_heads, 2))
