"""The arithmetic that the jnp implementations share: masks, score modifications and the online softmax state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from torch_core.specs import AttentionSpec

__all__ = ["SoftmaxState", "empty_state", "finish", "modified_scores", "update", "visible"]


class SoftmaxState(NamedTuple):
    """A running softmax over the keys seen so far (Milakov and Gimelshein 2018; FlashAttention's recurrence)."""

    maximum: jax.Array  # [..., queries]
    denominator: jax.Array  # [..., queries]
    numerator: jax.Array  # [..., queries, head_size]
    seen: jax.Array  # bool[..., queries]: some key was visible; a sink alone does not count


def visible(
    query_positions: jax.Array, key_positions: jax.Array, key_lens: jax.Array, spec: AttentionSpec
) -> jax.Array:
    """Returns which keys each query may see, by the conditions written down in `AttentionSpec`.

    Args:
        query_positions: int32[..., queries, 1].
        key_positions: int32[..., 1, keys].
        key_lens: int32 that broadcasts against both; keys from here on do not exist.
        spec: the conditions.
    """
    mask = key_positions < key_lens
    if spec.causal:
        mask &= key_positions <= query_positions
    if spec.window_left is not None:
        mask &= key_positions >= query_positions - spec.window_left
    if spec.window_right is not None:
        mask &= key_positions <= query_positions + spec.window_right
    if spec.attention_chunk is not None:
        mask &= key_positions // spec.attention_chunk == query_positions // spec.attention_chunk
    return mask


def modified_scores(
    scores: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    alibi_slopes: jax.Array | None,
    spec: AttentionSpec,
) -> jax.Array:
    """Applies scale, soft cap and ALiBi to raw `query @ key` scores, in this order.

    Args:
        scores: float[..., num_kv_heads, group, queries, keys].
        query_positions: int32[..., 1, 1, queries, 1].
        key_positions: int32[..., 1, 1, 1, keys].
        alibi_slopes: float[num_kv_heads, group, 1, 1] or None.
        spec: scale, soft cap and the form of ALiBi.
    """
    scores = scores * jnp.asarray(spec.scale, scores.dtype)
    if spec.logits_soft_cap is not None:
        cap = jnp.asarray(spec.logits_soft_cap, scores.dtype)
        scores = cap * jnp.tanh(scores / cap)
    if alibi_slopes is not None:
        distance = (key_positions - query_positions).astype(scores.dtype)
        if spec.use_alibi_sqrt:
            distance = jnp.where(distance <= 0, -jnp.sqrt(jnp.abs(distance)), 0)
        scores = scores + alibi_slopes * distance
    return scores


def empty_state(shape: tuple[int, ...], head_size: int, dtype: jnp.dtype, sinks: jax.Array | None) -> SoftmaxState:
    """Starts a softmax over no keys; a sink is a logit that counts in the denominator and has no value.

    Args:
        shape: the state's shape without head_size.
        head_size: of the values.
        dtype: the accumulation type.
        sinks: float that broadcasts to `shape`, or None.
    """
    numerator, seen = jnp.zeros((*shape, head_size), dtype), jnp.zeros(shape, bool)
    if sinks is None:
        return SoftmaxState(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), numerator, seen)
    sinks = sinks.astype(dtype)
    # One in value; written so that the gradient reaches the sink although the maximum has none.
    denominator = jnp.exp(sinks - jax.lax.stop_gradient(sinks))
    maximum = jnp.broadcast_to(jax.lax.stop_gradient(sinks), shape)
    return SoftmaxState(maximum, jnp.broadcast_to(denominator, shape), numerator, seen)


def update(state: SoftmaxState, scores: jax.Array, weighted_values: str, values: jax.Array) -> SoftmaxState:
    """Adds a run of keys to the state; masked scores are -inf, and their values must be finite.

    A run that is masked throughout leaves the state as it is, bit by bit: what a batch mate needs cannot show.

    Args:
        state: of shape `[..., queries]`.
        scores: float[..., queries, keys].
        weighted_values: the einsum of probabilities and values.
        values: the values of these keys.
    """
    maximum = jnp.maximum(state.maximum, jax.lax.stop_gradient(scores).max(-1))
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - shift[..., None])
    rescale = jnp.exp(state.maximum - shift)
    return SoftmaxState(
        maximum,
        state.denominator * rescale + weights.sum(-1),
        state.numerator * rescale[..., None] + jnp.einsum(weighted_values, weights, values),
        state.seen | (scores != -jnp.inf).any(-1),
    )


def finish(state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
    """Returns output and natural-log LSE; a query that saw nothing gives zeros and -inf."""
    denominator = jnp.where(state.seen, state.denominator, 1)
    out = jnp.where(state.seen[..., None], state.numerator / denominator[..., None], 0)
    return out, jnp.where(state.seen, state.maximum + jnp.log(denominator), -jnp.inf)
