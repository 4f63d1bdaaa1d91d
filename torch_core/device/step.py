"""One step of attention: a tile of keys and values taken into the running softmax of a tile of query rows."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.dropout import kept_weights
from torch_core.device.mask import tile_scores
from torch_core.device.softmax import softmax_step
from torch_core.device.tiles import key_rows, load_tile, token_head_scales


@triton.jit
def attend_tile(
    q, acc, row_max, row_sum, pages, position, columns, inside, query_pos, keys, scoring, LAYOUT: tl.constexpr,
    ALIBI_SQRT: tl.constexpr, NUM_RANGES: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, dropout=None,
):  # fmt: skip
    """Takes a tile of keys and values into the running softmax, and returns its new (acc, row_max, row_sum).

    Query rows q [rows, HEAD_PADDED] are in the type that the matrix units multiply. The keys of the tile are position +
    columns, in the blocks `pages` if paged; with MASKED those not `inside` are not read and count as 0. See
    mask.tile_scores for the rest. Sums of weights, and so the lse, are without dropout.
    """
    BLOCK_SIZE: tl.constexpr = LAYOUT.BLOCK_SIZE
    key_pos = position + columns
    rows = key_rows(keys.key, pages, position, columns, LAYOUT.KEY_STRIDES, BLOCK_SIZE, LAYOUT.PAGED)
    if LAYOUT.VALUE_OFFSET > 0:
        # One constant apart from the keys: no address arithmetic of their own.
        value_rows = rows + LAYOUT.VALUE_OFFSET
    else:
        value_rows = key_rows(keys.value, pages, position, columns, LAYOUT.VALUE_STRIDES, BLOCK_SIZE, LAYOUT.PAGED)
    key_factors = None
    if keys.key_scales is not None:
        key_factors = token_head_scales(keys.key_scales, pages, key_pos, inside, LAYOUT.SCALE_STRIDES, BLOCK_SIZE)
    k = load_tile(rows, inside, LAYOUT.HEAD_SIZE, LAYOUT.HEAD_PADDED, MASKED).to(q.dtype)
    # Before the softmax, so that widening 8-bit values overlaps the products.
    v = load_tile(value_rows, inside, LAYOUT.VALUE_SIZE, LAYOUT.VALUE_PADDED, MASKED).to(q.dtype)
    products = row_products(q, k, EXACT)
    scores, factor = tile_scores(
        products, query_pos, key_pos, key_factors, scoring, ALIBI_SQRT, NUM_RANGES, MASKED, EXACT
    )
    weights, keep, row_max, row_sum = softmax_step(scores, factor, row_max, row_sum, EXACT)
    if dropout is not None:
        weights = kept_weights(weights, position, dropout)
    if keys.value_scales is not None:
        factors = token_head_scales(keys.value_scales, pages, key_pos, inside, LAYOUT.SCALE_STRIDES, BLOCK_SIZE)
        weights = weights * factors[None, :]
    if EXACT:
        # Tile by tile: one chain of additions over all keys would lose digits that torch's blocked sums keep. The
        # fused form stops the compiler from turning the sum back into that chain.
        tile = tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        acc = tl.math.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), tile)
    else:
        acc = tl.dot(weights.to(q.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def row_products(a, b, EXACT: tl.constexpr):
    """a @ b^T in fp32, for rows of a head."""
    return _halved_dot(a, b) if EXACT and a.shape[1] > 128 else tl.dot(a, tl.trans(b), input_precision="ieee")


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
