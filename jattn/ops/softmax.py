"""The arithmetic that the jnp implementations share: masks, score modifications and the online softmax state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from torch_core.attention.call import AttentionCall


class SoftmaxState(NamedTuple):
    """A running softmax over the keys seen so far (Milakov and Gimelshein 2018; FlashAttention's recurrence)."""

    maximum: jax.Array  # [..., queries]
    denominator: jax.Array  # [..., queries]
    numerator: jax.Array  # [..., queries, head_size]
    seen: jax.Array  # bool[..., queries]: some key was visible; a sink alone does not count


def compute_dtype(call: AttentionCall[jax.Array]) -> jnp.dtype:
    """Returns the dtype to compute in."""
    return wide_dtype(call.query.dtype)


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns float32, or float64 for float64."""
    # jnp.promote_types refuses 16 bits where `jax_numpy_dtype_promotion` is "strict".
    return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def first_visible(call: AttentionCall[jax.Array], first_positions: jax.Array) -> jax.Array:
    """Returns the first key that a sequence's first query may see; spans may reach anywhere."""
    first = jnp.zeros_like(first_positions)
    if call.mm_prefix_range is not None:
        return first
    if call.spec.window_left is not None:
        first = jnp.maximum(first, first_positions - call.spec.window_left)
    if call.spec.attention_chunk is not None:
        first = jnp.maximum(first, first_positions // call.spec.attention_chunk * call.spec.attention_chunk)
    return first


class Segments(NamedTuple):
    """Queries and keys by segments, whose positions are aligned bottom-right."""

    positions: jax.Array  # int32[num_seqs, queries]
    key_positions: jax.Array  # int32[num_seqs, keys]
    pairs: jax.Array  # bool[num_seqs, queries, keys]: both are in one segment


def segments(query_ids: jax.Array, key_ids: jax.Array) -> Segments:
    """Returns the segments of ids int32[num_seqs, queries] and int32[num_seqs, keys]; 0 and below is padding."""

    def ranks(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        alike = ids[:, :, None] == ids[:, None, :]
        return jnp.tril(alike, -1).sum(-1, dtype=jnp.int32), alike.sum(-1, dtype=jnp.int32)

    pairs = (query_ids[:, :, None] == key_ids[:, None, :]) & (query_ids > 0)[:, :, None]
    position, length = ranks(query_ids)
    return Segments(pairs.sum(-1, dtype=jnp.int32) - length + position, ranks(key_ids)[0], pairs)


def visible(
    call: AttentionCall[jax.Array],
    query_positions: jax.Array,
    key_positions: jax.Array,
    key_lens: jax.Array,
    context: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns which keys each query may see, by the conditions written down in `AttentionSpec`, and the query bias.

    Args:
        call: the conditions.
        query_positions: int32[num_seqs, queries].
        key_positions: int32[keys], or int32[num_seqs, keys].
        key_lens: int32[num_seqs]; keys from here on do not exist.
        context: int32[num_seqs], the position of each sequence's first query.

    Returns:
        bool[num_seqs, queries, keys], and the bias of the same shape, 0 outside the new tokens, or None. A bias of
        -inf hides.
    """
    spec = call.spec
    queries, keys = query_positions[:, :, None], jnp.atleast_2d(key_positions)[:, None, :]
    exists = keys < key_lens[:, None, None]
    mask = exists
    if call.seq_causal is not None:
        mask &= (keys <= queries) | ~call.seq_causal[:, None, None]
    elif spec.causal:
        mask &= keys <= queries
    if spec.window_left is not None:
        mask &= keys >= queries - spec.window_left
    if spec.window_right is not None:
        mask &= keys <= queries + spec.window_right
    if spec.attention_chunk is not None:
        mask &= keys // spec.attention_chunk == queries // spec.attention_chunk
    if call.mm_prefix_range is not None:
        first, last = (call.mm_prefix_range[:, :, end, None, None] for end in range(2))
        inside = (first < last) & (queries[:, None] >= first) & (queries[:, None] <= last)
        inside &= (keys[:, None] >= first) & (keys[:, None] <= last)
        mask |= inside.any(1) & exists
    if call.qq_bias is None:
        return jnp.broadcast_to(mask, (*query_positions.shape, key_positions.shape[-1])), None
    rows, columns, size = queries - context[:, None, None], keys - context[:, None, None], call.qq_bias.shape[0]
    new = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < size)
    bias = jnp.where(new, call.qq_bias[jnp.clip(rows, 0, size - 1), jnp.clip(columns, 0, size - 1)], 0)
    return mask & (bias > -jnp.inf), jnp.where(bias > -jnp.inf, bias, 0)


def modified_scores(
    call: AttentionCall[jax.Array],
    scores: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    mask: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Applies scale, soft cap, biases and mask to raw `query @ key` scores, in this order.

    Args:
        call: the options.
        scores: float[num_seqs, num_kv_heads, group, queries, keys].
        query_positions: int32[num_seqs, queries].
        key_positions: int32[keys], or int32[num_seqs, keys].
        mask: see `visible`.
        bias: see `visible`.
    """
    spec = call.spec
    key_positions = jnp.atleast_2d(key_positions)[:, None, :]
    scores = scores * jnp.asarray(spec.scale, scores.dtype)
    if spec.logits_soft_cap is not None:
        cap = jnp.asarray(spec.logits_soft_cap, scores.dtype)
        scores = cap * jnp.tanh(scores / cap)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.astype(scores.dtype).reshape(1, call.num_kv_heads, -1, 1, 1)
        distance = (key_positions - query_positions[..., None])[:, None, None].astype(scores.dtype)
        if spec.use_alibi_sqrt:
            distance = jnp.where(distance <= 0, -jnp.sqrt(jnp.abs(distance)), 0)
        scores = scores + slopes * distance
    if call.relative_bias is not None:
        furthest = call.relative_bias.shape[1] // 2
        entry = jnp.clip(key_positions - query_positions[..., None], -furthest, furthest) + furthest
        by_head = call.relative_bias.astype(scores.dtype)[:, entry].swapaxes(0, 1)
        scores = scores + by_head.reshape(entry.shape[0], call.num_kv_heads, -1, *entry.shape[1:])
    if bias is not None:
        scores = scores + bias[:, None, None].astype(scores.dtype)
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def empty_state(call: AttentionCall[jax.Array]) -> SoftmaxState:
    """Starts a softmax over no keys, of shape [num_seqs, num_kv_heads, group, max_query_len].

    A sink is a logit that counts in the denominator and has no value.
    """
    dtype = compute_dtype(call)
    shape = (call.num_seqs, call.num_kv_heads, call.group, call.max_query_len)
    numerator, seen = jnp.zeros((*shape, call.value_head_size), dtype), jnp.zeros(shape, bool)
    if call.sinks is None:
        return SoftmaxState(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), numerator, seen)
    sinks = call.sinks.astype(dtype).reshape(call.num_kv_heads, -1, 1)
    maximum = jax.lax.stop_gradient(sinks)
    # One in value, or 0 for a sink of -inf, which is none; written so that the gradient reaches the sink although the
    # maximum has none.
    denominator = jnp.exp(sinks - jnp.where(maximum == -jnp.inf, 0, maximum))
    maximum = jnp.broadcast_to(maximum, shape)
    return SoftmaxState(maximum, jnp.broadcast_to(denominator, shape), numerator, seen)


def update(
    state: SoftmaxState, scores: jax.Array, weighted_values: str, values: jax.Array, dropout: jax.Array | None = None
) -> SoftmaxState:
    """Adds a run of keys to the state; masked scores are -inf, and their values must be finite.

    A completely masked run leaves the state unchanged bit by bit, so other sequences of the batch do not affect it.

    Args:
        state: state of shape `[..., queries]`.
        scores: float[..., queries, keys].
        weighted_values: the einsum of probabilities and values.
        values: the values of these keys.
        dropout: factors of the weights, shaped like scores; or None.
    """
    maximum = jnp.maximum(state.maximum, jax.lax.stop_gradient(scores).max(-1))
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - shift[..., None])
    rescale = jnp.exp(state.maximum - shift)
    kept = weights if dropout is None else weights * dropout
    return SoftmaxState(
        maximum,
        state.denominator * rescale + weights.sum(-1),
        state.numerator * rescale[..., None] + jnp.einsum(weighted_values, kept, values),
        state.seen | (scores != -jnp.inf).any(-1),
    )


def finish(state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
    """Returns output and natural-log LSE; a query that saw nothing gives zeros and -inf."""
    denominator = jnp.where(state.seen, state.denominator, 1)
    out = jnp.where(state.seen[..., None], state.numerator / denominator[..., None], 0)
    return out, jnp.where(state.seen, state.maximum + jnp.log(denominator), -jnp.inf)
