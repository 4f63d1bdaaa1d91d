"""The derivative of the gated delta rule with a gate for each key channel: gradients of queries, keys and gates.

In each channel tokens of two neighbouring blocks are decayed to the border of the blocks, as in `channels.py`. A token
is read by later ones and reads earlier ones; the gradient of a decay is that of the reader less that of the read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import chunk_columns, chunk_rows, zero_padding
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.systems import inverse_norms


@triton.jit
def gated_delta_channel_gradients_kernel(
    query,
    key,
    gk,
    d_out,
    query_start_loc,
    factors,
    decays,
    befores,
    d_afters,
    corrections,
    d_rights,
    d_overlaps,
    d_products,
    d_gk,
    query_parts,
    key_parts,
    num_tokens,
    num_seqs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    gk_token_stride,
    gk_head_stride,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads, tiles of BLOCK_K channels).

    Writes the gradients of gates, and for each head those of queries times their factors and of divided keys.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    gates_stride: tl.constexpr = NUM_HEADS * KEY_SIZE
    own = d_gk + head * KEY_SIZE
    zero_padding(own + channel, query_start_loc, num_tokens, num_seqs, gates_stride, channel < KEY_SIZE, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    live_tokens = tl.load(query_start_loc + seq + 1) - start - index * CHUNK
    live = step < live_tokens
    origin = (start + index * CHUNK).to(tl.int64)
    is_channel = (channel < KEY_SIZE)[:, None]
    is_key = is_channel & live[None, :]
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    held = decays + chunk * CHUNK * KEY_SIZE
    # First, while registers are free.
    near_read, near_query, near_added = _near_gradients(
        query + head // GROUP * query_head_stride + origin * query_token_stride,
        key + head // GROUP * key_head_stride + origin * key_token_stride, live_tokens, factors + chunk * 5 * CHUNK,
        held, d_overlaps + chunk * CHUNK * CHUNK, d_products + chunk * CHUNK * CHUNK, channel, query_token_stride,
        key_token_stride, KEY_SIZE, BLOCK_K, PRECISION, CHUNK,
    )  # fmt: skip
    by_read = tl.zeros([BLOCK_K, CHUNK], tl.float32)
    by_query = tl.zeros([BLOCK_K, CHUNK], tl.float32)
    by_added = tl.zeros([BLOCK_K, CHUNK], tl.float32)
    d_last = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, VALUE_PADDED, BLOCK_V):
        element = first + tl.arange(0, BLOCK_V)
        is_element = element < VALUE_SIZE
        plane = chunk * VALUE_SIZE * KEY_SIZE + element[None, :] * KEY_SIZE + channel[:, None]
        inside = is_channel & is_element[None, :]
        state = tl.load(befores + plane, mask=inside, other=0.0)
        d_state = tl.load(d_afters + plane, mask=inside, other=0.0)
        flat = chunk * CHUNK * VALUE_SIZE + element[:, None] * CHUNK + step[None, :]
        u = tl.load(corrections + flat, mask=is_element[:, None], other=0.0)
        d_r = tl.load(d_rights + flat, mask=is_element[:, None], other=0.0)
        results = chunk_columns(d_out + head * d_out_head_stride, origin, step, element, d_out_token_stride)
        d_o = tl.load(results, mask=is_element[:, None] & live[None, :], other=0.0)
        by_read = tl.dot(state, d_r, acc=by_read, input_precision=PRECISION)
        by_query = tl.dot(state, d_o, acc=by_query, input_precision=PRECISION)
        by_added = tl.dot(d_state, u, acc=by_added, input_precision=PRECISION)
        d_last += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)

    decay = tl.load(held + step[None, :] * KEY_SIZE + channel[:, None], mask=is_channel, other=0.0)
    last = tl.load(held + (CHUNK - 1) * KEY_SIZE + channel, mask=channel < KEY_SIZE, other=0.0)
    factor = factors + chunk * 5 * CHUNK + step
    keys = chunk_columns(key + head // GROUP * key_head_stride, origin, step, channel, key_token_stride)
    queries = chunk_columns(query + head // GROUP * query_head_stride, origin, step, channel, query_token_stride)
    k = tl.load(keys, mask=is_key, other=0.0).to(tl.float32) * tl.load(factor)[None, :]
    q = tl.load(queries, mask=is_key, other=0.0).to(tl.float32) * tl.load(factor + CHUNK)[None, :]
    # Keys enter the state before the chunk with a minus.
    by_read *= -tl.exp(decay)
    by_query *= tl.exp(decay)
    by_added *= tl.exp(last[:, None] - decay)
    d_last = d_last * tl.exp(last) + tl.sum(by_added * k, 1)
    by_read += near_read
    by_query += near_query
    by_added += near_added
    row = step[:, None]
    column = step[None, :]
    # Both orders of a pair: a later token reads, an earlier one is read.
    square = chunk * CHUNK * CHUNK + row * CHUNK + column
    for level in range(4, 6):
        border = ((column >> (level + 1)) << (level + 1)) + (1 << level) - 1
        there = tl.load(held + border * KEY_SIZE + channel[:, None], mask=is_channel, other=0.0)
        weight = tl.exp(-tl.abs(decay - there))
        is_pair = ((row >> level) ^ (column >> level)) == 1
        is_later = ((column >> level) & 1) == 1
        d_overlap = tl.where(is_pair, tl.load(d_overlaps + square), 0.0)
        d_p = tl.where(is_pair, tl.load(d_products + square), 0.0)
        # Without the choice the compiler computes this product in every warp, for all tokens.
        decayed = tl.where(is_key, k * weight, 0.0).to(dtype)
        by_keys = weight * tl.dot(decayed, d_overlap, input_precision=PRECISION)
        mixed = (tl.where(is_later, q, k) * weight).to(dtype)
        by_both = weight * tl.dot(mixed, d_p, input_precision=PRECISION)
        by_read += tl.where(is_later, by_keys, 0.0)
        by_query += tl.where(is_later, by_both, 0.0)
        by_added += tl.where(is_later, 0.0, by_keys + by_both)
    d_decay = q * by_query + k * (by_read - by_added)
    d_decay += tl.where(column == CHUNK - 1, d_last[:, None], 0.0)
    gates = chunk_columns(gk + head * gk_head_stride, origin, step, channel, gk_token_stride)
    gate = tl.load(gates, mask=is_key, other=0.0).to(tl.float32)
    d_gate = tl.where(gate > -100.0, tl.cumsum(d_decay, 1, reverse=True), 0.0)
    target = chunk_columns(own, origin, step, channel, gates_stride)
    tl.store(target, d_gate.to(d_gk.dtype.element_ty), mask=is_key)
    # In the product of a token with itself there is no decay.
    own_product = tl.load(d_products + chunk * CHUNK * CHUNK + step * (CHUNK + 1)).to(tl.float32)[None, :]
    flat = chunk * CHUNK * KEY_SIZE + step[None, :] * KEY_SIZE + channel[:, None]
    tl.store(query_parts + flat, (by_query + own_product * k).to(dtype), mask=is_channel)
    tl.store(key_parts + flat, (by_read + by_added + own_product * q).to(dtype), mask=is_channel)


@triton.jit
def gated_delta_parts_kernel(
    query,
    key,
    query_start_loc,
    query_parts,
    key_parts,
    d_query,
    d_key,
    num_tokens,
    num_seqs,
    scale,
    epsilon,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads of keys). Sums over the heads of a key in their order."""
    tile = tl.program_id(0)
    key_head = tl.program_id(1)
    channel = tl.arange(0, KEY_PADDED)
    is_channel = channel < KEY_SIZE
    key_stride: tl.constexpr = NUM_HEADS // GROUP * KEY_SIZE
    own = key_head * KEY_SIZE
    zero_padding(d_query + own + channel, query_start_loc, num_tokens, num_seqs, key_stride, is_channel, BLOCK_T)
    zero_padding(d_key + own + channel, query_start_loc, num_tokens, num_seqs, key_stride, is_channel, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    for first in range(0, CHUNK, BLOCK_T):
        step = first + tl.arange(0, BLOCK_T)
        is_key = (index * CHUNK + step < length)[:, None] & is_channel[None, :]
        origin = (start + index * CHUNK).to(tl.int64)
        d_q = tl.zeros([BLOCK_T, KEY_PADDED], tl.float32)
        d_k = tl.zeros([BLOCK_T, KEY_PADDED], tl.float32)
        for member in range(GROUP):
            chunk = (tile * NUM_HEADS + key_head * GROUP + member).to(tl.int64)
            flat = chunk * CHUNK * KEY_SIZE + step[:, None] * KEY_SIZE + channel[None, :]
            d_q += tl.load(query_parts + flat, mask=is_key, other=0.0).to(tl.float32)
            d_k += tl.load(key_parts + flat, mask=is_key, other=0.0).to(tl.float32)
        keys = chunk_rows(key + key_head * key_head_stride, origin, step, channel, key_token_stride)
        queries = chunk_rows(query + key_head * query_head_stride, origin, step, channel, query_token_stride)
        k = tl.load(keys, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(queries, mask=is_key, other=0.0).to(tl.float32)
        d_q *= scale
        if NORMALIZE:
            k_norm = inverse_norms(k, epsilon, NORMALIZE)[:, None]
            q_norm = inverse_norms(q, epsilon, NORMALIZE)[:, None]
            k *= k_norm
            q *= q_norm
            d_k = (d_k - k * tl.sum(d_k * k, 1)[:, None]) * k_norm
            d_q = (d_q - q * tl.sum(d_q * q, 1)[:, None]) * q_norm
        target = chunk_rows(d_query + own, origin, step, channel, key_stride)
        tl.store(target, d_q.to(d_query.dtype.element_ty), mask=is_key)
        target = chunk_rows(d_key + own, origin, step, channel, key_stride)
        tl.store(target, d_k.to(d_key.dtype.element_ty), mask=is_key)


@triton.jit
def _near_gradients(
    query, key, live_tokens, factor, held, d_overlaps, d_products, channel, query_token_stride, key_token_stride,
    KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns the parts of `by_read`, `by_query` and `by_added` by the pairs within blocks of 16 tokens.

    These blocks alone are multiplied, all at the same time.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    BLOCKS: tl.constexpr = CHUNK // 16
    block = tl.arange(0, BLOCKS)[:, None, None] * 16
    inner = tl.arange(0, 16)
    row = inner[None, :, None]
    column = inner[None, None, :]
    token = block + column
    lane = channel[None, :, None]
    is_channel = lane < KEY_SIZE
    is_key = is_channel & (token < live_tokens)
    k = tl.load(key + token * key_token_stride + lane, mask=is_key, other=0.0)
    q = tl.load(query + token * query_token_stride + lane, mask=is_key, other=0.0)
    k = k.to(tl.float32) * tl.load(factor + token)
    q = q.to(tl.float32) * tl.load(factor + CHUNK + token)
    decay = tl.load(held + token * KEY_SIZE + lane, mask=is_channel, other=0.0)
    square = (block + row) * CHUNK + block + column
    d_overlap = tl.load(d_overlaps + square)
    d_p = tl.load(d_products + square)
    by_read = tl.zeros([BLOCKS, BLOCK_K, 16], tl.float32)
    by_query = tl.zeros([BLOCKS, BLOCK_K, 16], tl.float32)
    by_added = tl.zeros([BLOCKS, BLOCK_K, 16], tl.float32)
    for level in range(4):
        border = ((token >> (level + 1)) << (level + 1)) + (1 << level) - 1
        there = tl.load(held + border * KEY_SIZE + lane, mask=is_channel, other=0.0)
        weight = tl.exp(-tl.abs(decay - there))
        is_pair = ((row >> level) ^ (column >> level)) == 1
        is_later = ((column >> level) & 1) == 1
        decayed = tl.where(is_key, k * weight, 0.0).to(dtype)
        by_keys = tl.dot(decayed, tl.where(is_pair, d_overlap, 0.0), input_precision=PRECISION)
        mixed = (tl.where(is_later, q, k) * weight).to(dtype)
        by_both = weight * tl.dot(mixed, tl.where(is_pair, d_p, 0.0), input_precision=PRECISION)
        by_keys *= weight
        by_read += tl.where(is_later, by_keys, 0.0)
        by_query += tl.where(is_later, by_both, 0.0)
        by_added += tl.where(is_later, 0.0, by_keys + by_both)
    return _in_a_row(by_read, BLOCK_K, CHUNK), _in_a_row(by_query, BLOCK_K, CHUNK), _in_a_row(by_added, BLOCK_K, CHUNK)


@triton.jit
def _in_a_row(blocks, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr):
    return tl.reshape(tl.permute(blocks, (1, 0, 2)), [BLOCK_K, CHUNK])
