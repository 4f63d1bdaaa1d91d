"""The derivative of the gated delta rule: the gradients of tokens, of all chunks at the same time.

R, U, P and the other names are those of `backward.py`. Tiles are turned so that products have 32 rows, which single
warps multiply: ptxas of CUDA 12 and 13.0 miscompiles kernels with several products of Hopper's warpgroups, which take
64 (triton-lang/triton#11366).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import chunk_columns, chunk_rows, natural_exp, zero_padding, zero_rows
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.systems import chunk_program, decay_sums, inverse_norms


@triton.jit
def gated_delta_value_gradients_kernel(
    key,
    value,
    d_out,
    query_start_loc,
    inverses,
    products,
    factors,
    lowers,
    reads,
    adds,
    through,
    befores,
    d_afters,
    d_value,
    d_beta,
    decay_parts,
    corrections,
    d_rights,
    num_tokens,
    num_seqs,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads). Writes the gradients of values and betas.

    And U as `corrections` and the gradients of R as `d_rights`, both [values, tokens] for each chunk and head; and with
    a gate of the head the gradient of the decay from the chunk's start, without the part of the results, as
    `decay_parts`, in float32.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    own = d_value + head * VALUE_SIZE
    value_stride: tl.constexpr = NUM_HEADS * VALUE_SIZE
    span = tl.arange(0, VALUE_PADDED)
    one = tl.arange(0, 1)
    zero_padding(own + span, query_start_loc, num_tokens, num_seqs, value_stride, span < VALUE_SIZE, BLOCK_T)
    zero_padding(d_beta + head + one, query_start_loc, num_tokens, num_seqs, NUM_HEADS, one == 0, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    live = index * CHUNK + step < tl.load(query_start_loc + seq + 1) - start
    # An address is a scalar and an offset within the chunk: registers are scarce.
    origin = (start + index * CHUNK).to(tl.int64)
    channel = tl.arange(0, KEY_PADDED)
    is_channel = channel < KEY_SIZE
    is_key = is_channel[:, None] & live[None, :]
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    square = chunk * CHUNK * CHUNK + step[:, None] * CHUNK + step[None, :]
    if through is None:
        keys = chunk_columns(key + head // GROUP * key_head_stride, origin, step, channel, key_token_stride)
        k = tl.load(keys, mask=is_key, other=0.0)
        held = factors + chunk * 5 * CHUNK
    else:
        rows = chunk * CHUNK * KEY_SIZE + step[None, :] * KEY_SIZE + channel[:, None]
        k = tl.load(reads + rows, mask=is_channel[:, None], other=0.0)
        added_keys = tl.load(adds + rows, mask=is_channel[:, None], other=0.0)
    d_rate = tl.zeros([BLOCK_V, CHUNK], tl.float32)
    # Of the decay from the chunk's start to each token, and to its end.
    d_decay = tl.zeros([BLOCK_V, CHUNK], tl.float32)
    d_last = 0.0
    for first in range(0, VALUE_PADDED, BLOCK_V):
        element = first + tl.arange(0, BLOCK_V)
        is_element = element < VALUE_SIZE
        is_value = is_element[:, None] & live[None, :]
        values = chunk_columns(value + head * value_head_stride, origin, step, element, value_token_stride)
        results = chunk_columns(d_out + head * d_out_head_stride, origin, step, element, d_out_token_stride)
        plane = chunk * VALUE_SIZE * KEY_SIZE + element[:, None] * KEY_SIZE + channel[None, :]
        inside = is_element[:, None] & is_channel[None, :]
        state = tl.load(befores + plane, mask=inside, other=0.0)
        d_state = tl.load(d_afters + plane, mask=inside, other=0.0)
        v = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
        d_o = tl.load(results, mask=is_value, other=0.0)
        r = tl.dot(state, k, input_precision=PRECISION)
        if through is None:
            r *= tl.load(held + step)[None, :]
            d_u = tl.dot(d_state, k, input_precision=PRECISION) * tl.load(held + 2 * CHUNK + step)[None, :]
            overlap = tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
            d_last += tl.load(held + 3 * CHUNK) * overlap
        else:
            d_u = tl.dot(d_state, added_keys, input_precision=PRECISION)
        r += v
        # Systems are read for each part of the values.
        inverse = tl.load(inverses + square)
        u = tl.dot(r.to(dtype), tl.trans(inverse), input_precision=PRECISION)
        u_narrow = u.to(dtype)
        p = tl.load(products + square)
        if through is None:
            d_last += tl.sum(tl.sum(d_u * u, 1), 0)
        d_u = tl.dot(d_o, p, acc=d_u, input_precision=PRECISION)
        d_r = tl.dot(d_u.to(dtype), inverse, input_precision=PRECISION)
        d_r_narrow = d_r.to(dtype)
        target = chunk_columns(own, origin, step, element, value_stride)
        tl.store(target, d_r.to(d_value.dtype.element_ty), mask=is_value)
        flat = chunk * CHUNK * VALUE_SIZE + element[:, None] * CHUNK + step[None, :]
        tl.store(corrections + flat, u_narrow, mask=is_element[:, None])
        tl.store(d_rights + flat, d_r_narrow, mask=is_element[:, None])
        # The error that beta multiplies, and its gradient divided by beta.
        lower = tl.load(lowers + square)
        error = r - tl.dot(u_narrow, tl.trans(lower), input_precision=PRECISION)
        d_error = d_u - tl.dot(d_r_narrow, lower, input_precision=PRECISION)
        d_rate += error * d_error
        if through is None:
            # What a token reads, less what later ones read of it. (The results' part is that of the queries.)
            d_decay += d_r * (error - v) - u * d_error
    d_rates = d_beta + (origin + step) * NUM_HEADS + head
    tl.store(d_rates, tl.sum(d_rate, 0).to(d_beta.dtype.element_ty), mask=live)
    if through is None:
        tl.store(decay_parts + chunk * CHUNK + step, tl.sum(d_decay, 0) + tl.where(step == CHUNK - 1, d_last, 0.0))


@triton.jit
def gated_delta_gate_gradients_kernel(
    g,
    query_start_loc,
    decay_parts,
    result_parts,
    d_g,
    num_tokens,
    num_seqs,
    g_token_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads). Writes the gradients of gates of heads."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    one = tl.arange(0, 1)
    zero_padding(d_g + head + one, query_start_loc, num_tokens, num_seqs, NUM_HEADS, one == 0, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    live = index * CHUNK + step < tl.load(query_start_loc + seq + 1) - start
    token = (start + index * CHUNK + step).to(tl.int64)
    part = (tile * NUM_HEADS + head).to(tl.int64) * CHUNK + step
    d_decay = tl.load(decay_parts + part) + tl.load(result_parts + part, mask=live, other=0.0)
    gate = tl.load(g + token * g_token_stride + head, mask=live, other=0.0).to(tl.float32)
    d_gate = tl.where(gate > -100.0, tl.cumsum(d_decay, 0, reverse=True), 0.0)
    tl.store(d_g + token * NUM_HEADS + head, d_gate.to(d_g.dtype.element_ty), mask=live)


@triton.jit
def gated_delta_product_gradients_kernel(
    d_out,
    query_start_loc,
    decays,
    norms,
    corrections,
    d_rights,
    d_overlaps,
    d_products,
    num_seqs,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads).

    Writes the gradients of the products of keys with keys, for both orders of a pair, and of queries with keys, as
    `d_overlaps` and `d_products`: of the arrays themselves if `norms` is given, otherwise of the normed and decayed
    ones, and for both orders too.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    row = tl.arange(0, CHUNK)
    column = tl.arange(0, CHUNK)
    live = index * CHUNK + row < tl.load(query_start_loc + seq + 1) - start
    origin = (start + index * CHUNK).to(tl.int64)
    chunk = (tile * NUM_HEADS + head).to(tl.int64)
    d_p = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, VALUE_PADDED, BLOCK_V):
        element = first + tl.arange(0, BLOCK_V)
        is_element = element < VALUE_SIZE
        held = chunk * CHUNK * VALUE_SIZE + element * CHUNK
        u = tl.load(corrections + held[:, None] + column[None, :], mask=is_element[:, None], other=0.0)
        d_r = tl.load(d_rights + held[None, :] + row[:, None], mask=is_element[None, :], other=0.0)
        results = chunk_rows(d_out + head * d_out_head_stride, origin, row, element, d_out_token_stride)
        d_o = tl.load(results, mask=live[:, None] & is_element[None, :], other=0.0)
        d_p = tl.dot(d_o, u, acc=d_p, input_precision=PRECISION)
        d_overlap = tl.dot(d_r, u, acc=d_overlap, input_precision=PRECISION)
    is_later = row[:, None] > column[None, :]
    d_p = tl.where(is_later | (row[:, None] == column[None, :]), d_p, 0.0)
    d_overlap = tl.where(is_later, -d_overlap, 0.0)
    if norms is not None:
        held = norms + chunk * 2 * CHUNK
        passed = decay_sums(decays, d_products.dtype.element_ty) + chunk * CHUNK
        decay = tl.load(passed + row)[:, None] - tl.load(passed + column)[None, :]
        weights = natural_exp(tl.minimum(decay, 0.0)) * tl.load(held + column)[None, :]
        d_p *= weights * tl.load(held + CHUNK + row)[:, None]
        d_overlap *= weights * tl.load(held + row)[:, None]
    else:
        d_p += tl.trans(tl.where(is_later, d_p, 0.0))
    square = chunk * CHUNK * CHUNK + row[:, None] * CHUNK + column[None, :]
    tl.store(d_products + square, d_p.to(d_products.dtype.element_ty))
    tl.store(d_overlaps + square, (d_overlap + tl.trans(d_overlap)).to(d_overlaps.dtype.element_ty))


@triton.jit
def gated_delta_key_gradients_kernel(
    query,
    key,
    d_out,
    query_start_loc,
    factors,
    befores,
    d_afters,
    corrections,
    d_rights,
    d_overlaps,
    d_products,
    result_parts,
    d_query,
    d_key,
    num_tokens,
    num_seqs,
    epsilon,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: tiles of BLOCK_C tokens, of heads of keys, of all chunks of the batch by a static bound.

    Sums over the heads of a key in their order. Writes the sums of results times their gradients of each token and
    head, in float32, as `result_parts`: they are those of queries times theirs.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile, key_head, part = chunk_program(NUM_HEADS // GROUP, CHUNK // BLOCK_C)
    channel = tl.arange(0, KEY_PADDED)
    is_channel = (channel < KEY_SIZE)[None, :]
    key_stride: tl.constexpr = NUM_HEADS // GROUP * KEY_SIZE
    own = key_head * KEY_SIZE + channel
    if tile == 0:
        zero_rows(d_query + own, query_start_loc, num_tokens, num_seqs, key_stride, channel < KEY_SIZE, BLOCK_T)
        zero_rows(d_key + own, query_start_loc, num_tokens, num_seqs, key_stride, channel < KEY_SIZE, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    row = part * BLOCK_C + tl.arange(0, BLOCK_C)
    if index * CHUNK + part * BLOCK_C >= length:
        return
    column = tl.arange(0, CHUNK)
    live = index * CHUNK + row < length
    # An address is a scalar and an offset within the chunk: registers are scarce.
    origin = (start + index * CHUNK).to(tl.int64)
    keys = key + key_head * key_head_stride
    queries = query + key_head * query_head_stride
    is_known = (index * CHUNK + column < length)[:, None] & is_channel
    is_key = live[:, None] & is_channel
    own_q = tl.load(chunk_rows(queries, origin, row, channel, query_token_stride), mask=is_key, other=0.0)
    # The gradients of keys and queries whose norms are constant.
    d_k = tl.zeros([BLOCK_C, KEY_PADDED], tl.float32)
    d_q = tl.zeros([BLOCK_C, KEY_PADDED], tl.float32)
    member_index = tl.arange(0, GROUP_PADDED)[None, :]
    sums = tl.zeros([BLOCK_C, GROUP_PADDED], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        chunk = (tile * NUM_HEADS + head).to(tl.int64)
        below = row[:, None] * CHUNK + column[None, :]
        above = column[None, :] * CHUNK + row[:, None]
        square = chunk * CHUNK * CHUNK
        d_p = tl.load(d_products + square + below)
        d_p_turned = tl.load(d_products + square + above)
        d_pairs = tl.load(d_overlaps + square + below)
        k = tl.load(chunk_rows(keys, origin, column, channel, key_token_stride), mask=is_known, other=0.0)
        q = tl.load(chunk_rows(queries, origin, column, channel, query_token_stride), mask=is_known, other=0.0)
        d_q = tl.dot(d_p, k, acc=d_q, input_precision=PRECISION)
        d_k = tl.dot(d_p_turned, q, acc=d_k, input_precision=PRECISION)
        d_k = tl.dot(d_pairs, k, acc=d_k, input_precision=PRECISION)
        held = factors + chunk * 5 * CHUNK + row
        into = tl.load(held)
        read = tl.load(held + CHUNK)
        added = tl.load(held + 2 * CHUNK)
        for first in range(0, VALUE_PADDED, BLOCK_V):
            element = first + tl.arange(0, BLOCK_V)
            is_element = element < VALUE_SIZE
            results = chunk_rows(d_out + head * d_out_head_stride, origin, row, element, d_out_token_stride)
            plane = chunk * VALUE_SIZE * KEY_SIZE + element[:, None] * KEY_SIZE + channel[None, :]
            inside = is_element[:, None] & is_channel
            state = tl.load(befores + plane, mask=inside, other=0.0)
            d_state = tl.load(d_afters + plane, mask=inside, other=0.0)
            flat = chunk * CHUNK * VALUE_SIZE + element[None, :] * CHUNK + row[:, None]
            u = tl.load(corrections + flat, mask=is_element[None, :], other=0.0)
            d_r = tl.load(d_rights + flat, mask=is_element[None, :], other=0.0)
            d_o = tl.load(results, mask=live[:, None] & is_element[None, :], other=0.0)
            d_o = (d_o.to(tl.float32) * read[:, None]).to(dtype)
            d_q = tl.dot(d_o, state, acc=d_q, input_precision=PRECISION)
            d_r = (d_r.to(tl.float32) * into[:, None]).to(dtype)
            d_k = tl.dot(d_r, state, acc=d_k, input_precision=PRECISION)
            u = (u.to(tl.float32) * added[:, None]).to(dtype)
            d_k = tl.dot(u, d_state, acc=d_k, input_precision=PRECISION)
        # Of all heads up to this one, less those before it.
        passed = tl.sum(tl.where(member_index < member, sums, 0.0), 1)
        here = tl.sum(d_q * own_q.to(tl.float32), 1) - passed
        sums = tl.where(member_index == member, here[:, None], sums)
    chunks = tl.cast(tile * NUM_HEADS + key_head * GROUP + member_index, tl.int64)
    tl.store(result_parts + chunks * CHUNK + row[:, None], sums, mask=member_index < GROUP)
    if NORMALIZE:
        k = tl.load(chunk_rows(keys, origin, row, channel, key_token_stride), mask=is_key, other=0.0)
        k_norm = inverse_norms(k, epsilon, NORMALIZE)
        q_norm = inverse_norms(own_q, epsilon, NORMALIZE)
        wide_k = k.to(tl.float32)
        wide_q = own_q.to(tl.float32)
        d_k -= wide_k * (tl.sum(d_k * wide_k, 1) * k_norm * k_norm)[:, None]
        d_q -= wide_q * (tl.sum(d_q * wide_q, 1) * q_norm * q_norm)[:, None]
    target = chunk_rows(d_query + key_head * KEY_SIZE, origin, row, channel, key_stride)
    tl.store(target, d_q.to(d_query.dtype.element_ty), mask=is_key)
    target = chunk_rows(d_key + key_head * KEY_SIZE, origin, row, channel, key_stride)
    tl.store(target, d_k.to(d_key.dtype.element_ty), mask=is_key)
