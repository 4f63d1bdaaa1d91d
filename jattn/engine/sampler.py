"""Choosing the next token on the device, each row by its own parameters and its own random numbers."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp

__all__ = ["SamplingKind", "sample", "sampling_kind"]


class SamplingKind(enum.Enum):
    """How much of the sampler a batch needs; static, so that a greedy batch compiles to an argmax."""

    GREEDY = "greedy"
    RANDOM = "random"
    FILTERED = "filtered"


def sampling_kind(temperatures: Sequence[float], top_ks: Sequence[int], top_ps: Sequence[float]) -> SamplingKind:
    """Returns the least kind that serves every row."""
    if all(temperature == 0 for temperature in temperatures):
        return SamplingKind.GREEDY
    if all(top_k <= 0 for top_k in top_ks) and all(top_p == 1 for top_p in top_ps):
        return SamplingKind.RANDOM
    return SamplingKind.FILTERED


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    kind: SamplingKind,
) -> jax.Array:
    """Returns one token for each row.

    A row's token depends on its own logits, parameters, seed and position only, never on its batch mates: the random
    key is `fold_in(key(seed), position)`. Filters are applied to the tempered distribution, top-k first, as in vLLM.

    Args:
        logits: float32[rows, vocab].
        temperature: float32[rows]; 0 takes the likeliest token.
        top_k: int32[rows]; 0 or less keeps all.
        top_p: float32[rows].
        seed: uint32[rows].
        position: int32[rows], the number of tokens generated before.
        kind: what the batch needs at least.

    Returns:
        int32[rows].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind is SamplingKind.GREEDY:
        return greedy
    # Below the likeliest: a tiny temperature then drives the others to -inf, where logits would go to inf alike.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    tempered = below / jnp.where(temperature > 0, temperature, 1)[:, None]
    if kind is SamplingKind.FILTERED:
        tempered = _filtered(tempered, top_k, top_p)
    # By name: a user's default may be "rbg", whose draws under vmap depend on the whole batch.
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s, impl="threefry2x32"), p))(seed, position)
    # The Gumbel-max trick: an argmax over perturbed logits is a draw from their softmax.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    drawn = jnp.argmax(tempered + noise, axis=-1).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, greedy)


def _filtered(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    vocab = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    order = jnp.arange(vocab, dtype=jnp.int32)[None]
    in_top_k = order < kept[:, None]
    probabilities = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    # A token stays while the mass before it is below top_p; the likeliest also where top_p is 0 as a float32.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    stays = in_top_k & ((before < top_p[:, None]) | (order == 0))
    threshold = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
