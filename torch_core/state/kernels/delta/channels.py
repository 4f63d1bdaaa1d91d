"""The systems of chunks with a gate for each key channel (Kimi Delta Attention, arXiv:2510.26692).

A product of two tokens is decayed between them in each channel. Tokens in two neighbouring blocks are both decayed to
the border of the blocks, so that no exponent is positive; blocks of 1, 2, 4 and so on hold all pairs of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import natural_exp
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.systems import decay_sums, inverse_norms


@triton.jit
def gated_delta_channels_kernel(
    query,
    key,
    beta,
    gk,
    query_start_loc,
    factors,
    decays,
    reads,
    queries,
    adds,
    through,
    num_seqs,
    scale,
    epsilon,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    beta_token_stride,
    gk_token_stride,
    gk_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads).

    Writes for each token: the logarithms of the decay from the chunk's start as `decays`; the negative key
    and the query as the state before the chunk sees them, `reads` and `queries`; the key as the state after it does,
    `adds`; as `factors` those of keys and queries for their norms, the product of both, and beta. And for each chunk
    the decay of its state, `through`, in float32.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    token = index * CHUNK + step
    live = token < tl.load(query_start_loc + seq + 1) - start
    place = (start + token).to(tl.int64)
    channel = tl.arange(0, KEY_PADDED)
    is_channel = (channel < KEY_SIZE)[None, :]
    is_key = live[:, None] & is_channel
    keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
    source = query + place[:, None] * query_token_stride + head // GROUP * query_head_stride + channel[None, :]
    gates = gk + place[:, None] * gk_token_stride + head * gk_head_stride + channel[None, :]
    # Of two sums with -inf no difference could be taken.
    gate = tl.load(gates, mask=is_key, other=0.0).to(tl.float32)
    gate = tl.maximum(gate, -100.0, propagate_nan=tl.PropagateNan.ALL)
    decays = decay_sums(decays, dtype)
    gate = gate.to(decays.dtype.element_ty)
    decay = tl.cumsum(gate, 0)
    last = tl.sum(gate, 0)
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    base = chunk * CHUNK * KEY_SIZE
    rows = step[:, None] * KEY_SIZE + channel[None, :]
    tl.store(decays + base + rows, decay, mask=is_channel)
    tl.store(through + chunk * KEY_SIZE + channel, natural_exp(last), mask=channel < KEY_SIZE)
    k = tl.load(keys, mask=is_key, other=0.0).to(tl.float32)
    k_norm = inverse_norms(k, epsilon, NORMALIZE)
    k *= k_norm[:, None]
    tl.store(reads + base + rows, (-k * natural_exp(decay)).to(dtype), mask=is_channel)
    tl.store(adds + base + rows, (k * natural_exp(last[None, :] - decay)).to(dtype), mask=is_channel)
    q = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
    q_norm = inverse_norms(q, epsilon, NORMALIZE) * scale
    q *= q_norm[:, None]
    tl.store(queries + base + rows, (q * natural_exp(decay)).to(dtype), mask=is_channel)
    held = factors + chunk * 5 * CHUNK + step
    tl.store(held, k_norm)
    tl.store(held + CHUNK, q_norm)
    tl.store(held + 2 * CHUNK, tl.sum(q * k, 1))
    rate = tl.load(beta + place * beta_token_stride + head, mask=live, other=0.0).to(tl.float32)
    tl.store(held + 4 * CHUNK, rate)


@triton.jit
def gated_delta_near_pairs_kernel(
    query,
    key,
    query_start_loc,
    factors,
    decays,
    overlaps,
    products,
    lowers,
    num_seqs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks, heads, blocks of 16 tokens). Writes the pairs within a block.

    `gated_delta_far_pairs_kernel` writes the others. Both together write `overlaps`, `products` and `lowers`, as
    `gated_delta_overlaps_kernel` does.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    begin = tl.program_id(2) * 16
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    live = index * CHUNK + begin + row < length
    origin = (start + index * CHUNK + begin).to(tl.int64)
    keys = key + head // GROUP * key_head_stride + origin * key_token_stride + row * key_token_stride
    source = query + head // GROUP * query_head_stride + origin * query_token_stride + row * query_token_stride
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    held = decay_sums(decays, dtype) + (chunk * CHUNK + begin) * KEY_SIZE
    by_key = tl.zeros([16, 16], tl.float32)
    by_query = tl.zeros([16, 16], tl.float32)
    for first in range(0, KEY_PADDED, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)[None, :]
        is_channel = channel < KEY_SIZE
        k = tl.load(keys + channel, mask=live & is_channel, other=0.0)
        q = tl.load(source + channel, mask=live & is_channel, other=0.0)
        decay = tl.load(held + row * KEY_SIZE + channel, mask=is_channel, other=0.0)
        there = tl.load(held + (row & ~1) * KEY_SIZE + channel, mask=is_channel, other=0.0)
        for level in range(4):
            weight = natural_exp(-tl.abs(decay - there))
            # The last token of the next level's earlier block, on its way while this level is computed.
            border = ((row >> (level + 2)) << (level + 2)) + (2 << level) - 1
            there = tl.load(held + border * KEY_SIZE + channel, mask=is_channel & (level < 3), other=0.0)
            x = (k.to(tl.float32) * weight).to(dtype)
            y = (q.to(tl.float32) * weight).to(dtype)
            # Both orders of a pair: the upper triangle is cleared at the end.
            is_pair = ((row >> level) ^ (column >> level)) == 1
            by_key += tl.where(is_pair, tl.dot(x, tl.trans(x), input_precision=PRECISION), 0.0)
            by_query += tl.where(is_pair, tl.dot(y, tl.trans(x), input_precision=PRECISION), 0.0)
    _store_pairs(by_key, by_query, overlaps, products, lowers, factors, chunk, begin + row, begin + column, True, CHUNK)


@triton.jit
def gated_delta_far_pairs_kernel(
    query,
    key,
    query_start_loc,
    factors,
    decays,
    overlaps,
    products,
    lowers,
    num_seqs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks, heads). See `gated_delta_near_pairs_kernel`."""
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    live = index * CHUNK + row < tl.load(query_start_loc + seq + 1) - start
    origin = (start + index * CHUNK).to(tl.int64)
    keys = key + head // GROUP * key_head_stride + origin * key_token_stride + row * key_token_stride
    source = query + head // GROUP * query_head_stride + origin * query_token_stride + row * query_token_stride
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    held = decay_sums(decays, dtype) + chunk * CHUNK * KEY_SIZE
    by_key = tl.zeros([CHUNK, CHUNK], tl.float32)
    by_query = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, KEY_PADDED, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)[None, :]
        is_channel = channel < KEY_SIZE
        k = tl.load(keys + channel, mask=live & is_channel, other=0.0)
        q = tl.load(source + channel, mask=live & is_channel, other=0.0)
        decay = tl.load(held + row * KEY_SIZE + channel, mask=is_channel, other=0.0)
        for level in range(4, 6):
            border = ((row >> (level + 1)) << (level + 1)) + (1 << level) - 1
            there = tl.load(held + border * KEY_SIZE + channel, mask=is_channel, other=0.0)
            weight = natural_exp(-tl.abs(decay - there))
            x = (k.to(tl.float32) * weight).to(dtype)
            y = (q.to(tl.float32) * weight).to(dtype)
            is_pair = ((row >> level) ^ (column >> level)) == 1
            by_key += tl.where(is_pair, tl.dot(x, tl.trans(x), input_precision=PRECISION), 0.0)
            by_query += tl.where(is_pair, tl.dot(y, tl.trans(x), input_precision=PRECISION), 0.0)
    is_own = row // 16 != column // 16
    _store_pairs(by_key, by_query, overlaps, products, lowers, factors, chunk, row, column, is_own, CHUNK)


@triton.jit
def _store_pairs(
    by_key, by_query, overlaps, products, lowers, factors, chunk, row, column, is_own, CHUNK: tl.constexpr
):  # fmt: skip
    factor = factors + chunk * 5 * CHUNK
    by_key = tl.where(row > column, by_key, 0.0) * tl.load(factor + row) * tl.load(factor + column)
    by_query = tl.where(row > column, by_query, 0.0) * tl.load(factor + CHUNK + row) * tl.load(factor + column)
    by_query += tl.where(row == column, tl.load(factor + 2 * CHUNK + row), 0.0)
    square = chunk * CHUNK * CHUNK + row * CHUNK + column
    tl.store(products + square, by_query.to(products.dtype.element_ty), mask=is_own)
    if lowers is not None:
        tl.store(lowers + square, by_key.to(lowers.dtype.element_ty), mask=is_own)
    by_key *= tl.load(factor + 4 * CHUNK + row)
    tl.store(overlaps + square, by_key, mask=is_own & (row // 16 >= column // 16))
