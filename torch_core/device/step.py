"""One step of attention: a tile of keys and values taken into the running softmax of a tile of query rows."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import tile_scores
from torch_core.device.softmax import softmax_step
from torch_core.device.tiles import key_rows, load_tile, token_head_scales

__all__ = ["attend_tile"]


@triton.jit
def attend_tile(
    q,
    acc,
    row_max,
    row_sum,
    pages,
    position,
    columns,
    inside,
    query_pos,
    num_keys,
    context,
    key_base,
    value_base,
    key_scales,
    value_scales,
    window_left,
    window_right,
    attention_chunk,
    ranges,
    scale,
    soft_cap,
    slopes,
    qq_bias,
    qq_bias_size,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Scores a tile of keys, weighs its values and adds them to the accumulated rows.

    Args:
        q: query rows [rows, HEAD_PADDED] in the type that the matrix units multiply.
        acc, row_max, row_sum: the running softmax: unnormalised output rows, maxima and sums.
        pages: block id of each key (paged), else not used.
        position: position of the first key.
        columns: the keys of the tile, counted from it.
        inside: keys that may be read; the others count as 0. Not used unless MASKED.
        query_pos: positions of the rows.
        num_keys: keys of the sequence.
        context: tokens of the sequence before its first query.
        key_base, value_base: keys and values, at the sequence's head.
        key_scales, value_scales: scales per token and head, at the sequence's head, or None.
        window_left, window_right, attention_chunk, ranges: bounds, None where there is none.
        scale, soft_cap, slopes, qq_bias, qq_bias_size: what is done to scores, None where nothing is.
        VALUE_OFFSET: elements from a key row to its value row where both lie in one array, else 0.

    Returns:
        The new (acc, row_max, row_sum).
    """
    keys = position + columns
    rows = key_rows(key_base, pages, position, columns, KEY_STRIDES, BLOCK_SIZE, PAGED)
    if VALUE_OFFSET > 0:
        # One constant apart from the keys: no address arithmetic of their own.
        value_rows = rows + VALUE_OFFSET
    else:
        value_rows = key_rows(value_base, pages, position, columns, VALUE_STRIDES, BLOCK_SIZE, PAGED)
    key_factors = None
    if key_scales is not None:
        key_factors = token_head_scales(key_scales, pages, keys, inside, SCALE_STRIDES, BLOCK_SIZE)
    k = load_tile(rows, inside, HEAD_SIZE, HEAD_PADDED, MASKED).to(q.dtype)
    # Before the softmax, so that widening 8-bit values overlaps the products.
    v = load_tile(value_rows, inside, VALUE_SIZE, VALUE_PADDED, MASKED).to(q.dtype)
    if EXACT and HEAD_PADDED > 128:  # noqa: SIM108
        products = _halved_dot(q, k)
    else:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores, factor = tile_scores(
        products,
        query_pos,
        keys,
        num_keys,
        scale,
        key_factors,
        soft_cap,
        slopes,
        qq_bias,
        qq_bias_size,
        context,
        window_left,
        window_right,
        attention_chunk,
        ranges,
        ALIBI_SQRT,
        NUM_RANGES,
        MASKED,
        EXACT,
    )
    weights, keep, row_max, row_sum = softmax_step(scores, factor, row_max, row_sum, EXACT)
    if value_scales is not None:
        weights = weights * token_head_scales(value_scales, pages, keys, inside, SCALE_STRIDES, BLOCK_SIZE)[None, :]
    if EXACT:
        # Tile by tile: one chain of additions over all keys would lose digits that torch's blocked sums keep. The
        # fused form stops the compiler from turning the sum back into that chain.
        tile = tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        acc = tl.math.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), tile)
    else:
        acc = tl.dot(weights.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def _halved_dot(q, k):
    """q @ k^T in fp32, even and odd columns apart: half as long a chain of additions loses half as many digits."""
    half: tl.constexpr = q.shape[1] // 2
    q_even, q_odd = tl.split(tl.reshape(q, [q.shape[0], half, 2]))
    k_even, k_odd = tl.split(tl.reshape(k, [k.shape[0], half, 2]))
    even = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    odd = tl.dot(q_odd, tl.trans(k_odd), input_precision="ieee")
    # Fused, or the compiler makes one chain of the two.
    return tl.math.fma(even, tl.full(even.shape, 1.0, tl.float32), odd)
