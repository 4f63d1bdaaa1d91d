"""Dense attention in jnp with features that no kernel has: any mask, any bias, dropout, and sown weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.ops import softmax
from jattn.ops.attention import dense_call
from torch_core.attention.call import DenseCall
from torch_core.launch.call import array_fields


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_lens: jax.Array | None = None,
    key_lens: jax.Array | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    on_weights: Callable[[jax.Array], jax.Array] | None = None,
    precision: Any = None,
    **options: Any,
) -> jax.Array:
    """Attends within each row of a padded batch; every score is kept for the derivative.

    Args:
        query: float[batch, length, num_heads, head_size].
        key: float[batch, key_length, num_kv_heads, head_size].
        value: float[batch, key_length, num_kv_heads, value_head_size].
        query_lens, key_lens: int32[batch], real tokens of each row; None for all. The last real query is aligned
            with the last real key.
        segment_ids: int32[batch, length] and int32[batch, key_length]: queries see keys with their id, and positions
            count in these segments; 0 and below is padding.
        mask: bool, broadcastable to [batch, num_heads, length, key_length]; False hides.
        bias: float, likewise, added to the scores.
        on_weights: takes the weights float[batch, num_heads, length, key_length] and returns those to use: dropout.
        precision: precision of the two products.
        **options: how scores are masked, scaled and biased, as in `attention`.

    Returns:
        float[batch, length, num_heads, value_head_size] in the query's dtype; rows that see nothing are 0, and so are
        rows past a query length.

    Raises:
        InvalidInput: shapes or dtypes do not fit.
    """
    (batch, length, num_heads, head_size), (key_length, num_kv_heads) = query.shape, key.shape[1:3]
    # Only described, never run: the inputs of masks and score modifications of the packed form.
    starts = jnp.arange(batch + 1, dtype=jnp.int32)
    packed_query, packed_key, packed_value = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    ids: dict[str, Any] = {}
    if segment_ids is not None:
        ids = {"segment_ids": segment_ids[0].reshape(-1), "key_segment_ids": segment_ids[1].reshape(-1)}
    call = dense_call(
        packed_query,
        packed_key,
        packed_value,
        starts * length,
        starts * key_length,
        max_query_len=length,
        **ids,
        **options,
    )
    call.check()
    # One row of positions serves the whole batch where no row has a length of its own.
    own = any(array_fields(DenseCall)[name].dims[0] == "num_seqs" for name in call.arrays())
    rows = 1 if query_lens is None and key_lens is None and segment_ids is None and not own else batch
    query, (key, value) = _real(query, query_lens), (_real(x, key_lens) for x in (key, value))
    query_lens, key_lens = (
        jnp.full(rows, size, jnp.int32) if lens is None else lens.astype(jnp.int32)
        for lens, size in ((query_lens, length), (key_lens, key_length))
    )
    context = key_lens - query_lens
    positions, key_positions = (jnp.arange(count, dtype=jnp.int32) for count in (length, key_length))
    positions = context[:, None] + positions[None]
    pairs = None
    if segment_ids is not None:
        positions, key_positions, pairs = softmax.segments(*segment_ids)
        query, key, value = (
            jnp.where((each > 0)[:, :, None, None], x, 0)
            for x, each in ((query, segment_ids[0]), (key, segment_ids[1]), (value, segment_ids[1]))
        )
    visible, new_bias = softmax.visible(call, positions, key_positions, key_lens, context)
    visible = visible if pairs is None else visible & pairs
    if rows == batch:
        visible &= (jnp.arange(length, dtype=jnp.int32)[None] < query_lens[:, None])[:, :, None]

    dtype = softmax.compute_dtype(call)
    grouped = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_size)
    products = {"precision": precision, "preferred_element_type": dtype}
    scores = jnp.einsum("bthgd,bshd->bhgts", grouped, key, **products)
    scores = softmax.modified_scores(call, scores, positions, key_positions, visible, new_bias)
    if bias is not None:
        scores = scores + _by_head(bias, num_kv_heads).astype(dtype)
    if mask is not None:
        scores = jnp.where(_by_head(mask, num_kv_heads), scores, -jnp.inf)

    largest = jax.lax.stop_gradient(scores).max(-1, initial=-jnp.inf, keepdims=True)
    sinks = None if call.sinks is None else call.sinks.astype(dtype).reshape(1, num_kv_heads, -1, 1, 1)
    if sinks is not None:
        largest = jnp.maximum(largest, jax.lax.stop_gradient(sinks))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks - largest))
    weights = weights / jnp.where(total > 0, total, 1)
    if on_weights is not None:
        weights = on_weights(weights.reshape(batch, num_heads, length, key_length)).reshape(weights.shape)
    out = jnp.einsum("bhgts,bshd->bthgd", weights.astype(value.dtype), value, **products)
    return out.reshape(batch, length, num_heads, value.shape[-1]).astype(query.dtype)


def _real(array: jax.Array, lens: jax.Array | None) -> jax.Array:
    """Returns zeros past each row's end: anything at all lies there, and 0 times NaN is NaN, in a derivative too."""
    if lens is None:
        return array
    return jnp.where((jnp.arange(array.shape[1], dtype=jnp.int32)[None] < lens[:, None])[:, :, None, None], array, 0)


def _by_head(array: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns [batch, num_heads or 1, ...], or its last axes, as [batch, num_kv_heads or 1, group or 1, ...]."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    heads = array.shape[1]
    split = (1, 1) if heads == 1 else (num_kv_heads, heads // num_kv_heads)
    return array.reshape(array.shape[0], *split, *array.shape[2:])
