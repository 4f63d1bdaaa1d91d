"""The derivative of the gated delta rule with a gate for each key channel: gradients of queries, keys and gates.

In each channel tokens of two neighbouring blocks are decayed to the border of the blocks, as in `channels.py`. A token
is read by later ones and reads earlier ones; the gradient of a decay is that of the reader less that of the read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import chunk_columns, chunk_rows, natural_exp, zero_padding, zero_rows
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.systems import chunk_program, decay_sums, inverse_norms


@triton.jit
def gated_delta_near_gradients_kernel(
    query,
    key,
    query_start_loc,
    factors,
    decays,
    d_overlaps,
    d_products,
    query_parts,
    key_parts,
    gate_parts,
    num_seqs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads, blocks of 16 tokens and tiles of BLOCK_K channels).

    Writes what the pairs within a block add to the gradients of queries times their factors, of divided keys, and of
    the decay from the chunk's start.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    BLOCKS: tl.constexpr = CHUNK // 16
    tile = tl.program_id(0)
    head = tl.program_id(1)
    channel = (tl.program_id(2) // BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K))[:, None]
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    first = tl.program_id(2) % BLOCKS * 16
    if index * CHUNK + first >= length:
        return
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    origin = (start + index * CHUNK + first).to(tl.int64)
    is_channel = channel < KEY_SIZE
    is_key = is_channel & (index * CHUNK + first + column < length)
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    keys = key + head // GROUP * key_head_stride + origin * key_token_stride
    queries = query + head // GROUP * query_head_stride + origin * query_token_stride
    k = tl.load(keys + column * key_token_stride + channel, mask=is_key, other=0.0).to(tl.float32)
    q = tl.load(queries + column * query_token_stride + channel, mask=is_key, other=0.0).to(tl.float32)
    held = decay_sums(decays, dtype) + (chunk * CHUNK + first) * KEY_SIZE + channel
    decay = tl.load(held + column * KEY_SIZE, mask=is_channel, other=0.0)
    there = tl.load(held + (column & ~1) * KEY_SIZE, mask=is_channel, other=0.0)
    square = (chunk * CHUNK + first) * CHUNK + first + row * CHUNK + column
    d_overlap = tl.load(d_overlaps + square)
    d_p = tl.load(d_products + square)
    factor = factors + chunk * 5 * CHUNK + first + column
    k *= tl.load(factor)
    q *= tl.load(factor + CHUNK)
    by_read = tl.zeros([BLOCK_K, 16], tl.float32)
    by_query = tl.zeros([BLOCK_K, 16], tl.float32)
    by_added = tl.zeros([BLOCK_K, 16], tl.float32)
    for level in range(4):
        weight = natural_exp(-tl.abs(decay - there))
        # Of the next level, on its way while this one is computed.
        border = ((column >> (level + 2)) << (level + 2)) + (2 << level) - 1
        there = tl.load(held + border * KEY_SIZE, mask=is_channel & (level < 3), other=0.0)
        is_pair = ((row >> level) ^ (column >> level)) == 1
        is_later = ((column >> level) & 1) == 1
        # Without the choice the compiler computes this product in the layout of an operand.
        decayed = tl.where(is_key, k * weight, 0.0).to(dtype)
        by_keys = weight * tl.dot(decayed, tl.where(is_pair, d_overlap, 0.0), input_precision=PRECISION)
        mixed = (tl.where(is_later, q, k) * weight).to(dtype)
        by_both = weight * tl.dot(mixed, tl.where(is_pair, d_p, 0.0), input_precision=PRECISION)
        by_read += tl.where(is_later, by_keys, 0.0)
        by_query += tl.where(is_later, by_both, 0.0)
        by_added += tl.where(is_later, 0.0, by_keys + by_both)
    flat = (chunk * CHUNK + first) * KEY_SIZE + column * KEY_SIZE + channel
    tl.store(query_parts + flat, by_query.to(dtype), mask=is_channel)
    tl.store(key_parts + flat, (by_read + by_added).to(dtype), mask=is_channel)
    tl.store(gate_parts + flat, q * by_query + k * (by_read - by_added), mask=is_channel)


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
    query_parts,
    key_parts,
    gate_parts,
    d_gk,
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
    """Grid: tiles of BLOCK_K channels, of heads, of all chunks of the batch by a static bound.

    Writes the gradients of gates, and for each head those of queries times their factors and of divided keys.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile, head, part = chunk_program(NUM_HEADS, (KEY_SIZE + BLOCK_K - 1) // BLOCK_K)
    channel = part * BLOCK_K + tl.arange(0, BLOCK_K)
    gates_stride: tl.constexpr = NUM_HEADS * KEY_SIZE
    own = d_gk + head * KEY_SIZE
    if tile == 0:
        zero_rows(own + channel, query_start_loc, num_tokens, num_seqs, gates_stride, channel < KEY_SIZE, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    live = index * CHUNK + step < tl.load(query_start_loc + seq + 1) - start
    origin = (start + index * CHUNK).to(tl.int64)
    is_channel = (channel < KEY_SIZE)[:, None]
    is_key = is_channel & live[None, :]
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    held = decay_sums(decays, dtype) + chunk * CHUNK * KEY_SIZE
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
    by_read *= -natural_exp(decay)
    by_query *= natural_exp(decay)
    by_added *= natural_exp(last[:, None] - decay)
    d_last = d_last * natural_exp(last) + tl.sum(by_added * k, 1)
    row = step[:, None]
    column = step[None, :]
    # Both orders of a pair: a later token reads, an earlier one is read. Pairs within blocks of 16 are added below.
    square = chunk * CHUNK * CHUNK + row * CHUNK + column
    for level in range(4, 6):
        border = ((column >> (level + 1)) << (level + 1)) + (1 << level) - 1
        there = tl.load(held + border * KEY_SIZE + channel[:, None], mask=is_channel, other=0.0)
        weight = natural_exp(-tl.abs(decay - there))
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
    flat = chunk * CHUNK * KEY_SIZE + step[None, :] * KEY_SIZE + channel[:, None]
    d_decay = q * by_query + k * (by_read - by_added) + tl.load(gate_parts + flat, mask=is_key, other=0.0)
    d_decay += tl.where(column == CHUNK - 1, d_last[:, None], 0.0)
    gates = chunk_columns(gk + head * gk_head_stride, origin, step, channel, gk_token_stride)
    gate = tl.load(gates, mask=is_key, other=0.0).to(tl.float32)
    # The sums from each token to the chunk's end, by exact products: a scan over the warps takes much longer.
    is_after = tl.where(row >= column, 1.0, 0.0).to(tl.bfloat16)
    d_gate = tl.zeros([BLOCK_K, CHUNK], tl.float32)
    for _ in tl.static_range(3):
        digits = d_decay.to(tl.bfloat16)
        d_gate = tl.dot(digits, is_after, acc=d_gate)
        d_decay -= digits.to(tl.float32)
    target = chunk_columns(own, origin, step, channel, gates_stride)
    tl.store(target, tl.where(gate > -100.0, d_gate, 0.0).to(d_gk.dtype.element_ty), mask=is_key)
    # In the product of a token with itself there is no decay.
    own_product = tl.load(d_products + chunk * CHUNK * CHUNK + step * (CHUNK + 1)).to(tl.float32)[None, :]
    d_q = by_query + own_product * k + tl.load(query_parts + flat, mask=is_key, other=0.0).to(tl.float32)
    d_k = by_read + by_added + own_product * q + tl.load(key_parts + flat, mask=is_key, other=0.0).to(tl.float32)
    tl.store(query_parts + flat, d_q.to(dtype), mask=is_key)
    tl.store(key_parts + flat, d_k.to(dtype), mask=is_key)


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
