"""The derivative of Mamba-2's state space model: the gradients of tokens, of all chunks at the same time.

With the names of `backward.py`, and P[t, i] = exp(L[t] - L[i]) for i <= t: the gradient of x[i] is step[i] times the
sum over t of P[t, i] (C[t] B[i]) dy[t], and of exp(L[end] - L[i]) dS B[i]. Those of B and C are products with P[t, i]
(dy[t] x[i]), whose sum over the heads of a group is multiplied once, and sums over heads of x[i] dS and dy[t] S. Their
products with B[i] and C[t] are what a token adds to dS S after and before the chunk: no other product gives these.

Operands of products are the arrays as they are in memory, and factors of tokens scale results: the next head's can then
be loaded during the products of this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import zero_padding
from torch_core.device.work import locate_tile
from torch_core.state.kernels.mamba.chunks import rows_of, span_number, tokens_of
from torch_core.state.kernels.mamba.kernel import step_sizes


@triton.jit
def mamba_value_gradients_kernel(
    x,
    B,
    D,
    d_out,
    query_start_loc,
    products,
    steps,
    decays,
    kept,
    d_x,
    d_products,
    by_token,
    head_sums,
    num_tokens,
    num_seqs,
    x_token_stride,
    x_head_stride,
    B_token_stride,
    B_group_stride,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, parts of MEMBERS heads of a group).

    Writes the gradient of x; the gradient of the products of B and C, as a sum over the part's heads; for each token
    and head the gradient of its step size and of its decay within the chunk; and of each head its part of that of D.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    parts: tl.constexpr = NUM_HEADS // MEMBERS
    x_stride: tl.constexpr = NUM_HEADS * HEAD_DIM
    element = tl.arange(0, DIM_PADDED)
    for member in range(MEMBERS):
        d_values = d_x + (part * MEMBERS + member) * HEAD_DIM + element
        zero_padding(d_values, query_start_loc, num_tokens, num_seqs, x_stride, element < HEAD_DIM, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    # Addresses are a scalar and offsets of 32 bits where strides are known: registers are scarce.
    origin = (start + index * CHUNK).to(tl.int64)
    place, live = tokens_of(start, index * CHUNK, length, CHUNK)
    group = part * MEMBERS // GROUP
    column = tl.arange(0, STATE_PADDED)
    is_column = column < STATE_SIZE
    b = rows_of(B + group * B_group_stride, place, live, column, B_token_stride, STATE_SIZE, STATE_PADDED)
    token = tl.arange(0, CHUNK)
    # Rows are the tokens that give, columns those that take.
    is_past = (token[:, None] <= token[None, :]) & live[None, :]
    product = products + (origin * NUM_GROUPS + group) * CHUNK + token[None, :] * NUM_GROUPS * CHUNK + token[:, None]
    product = tl.load(product, mask=live[None, :], other=0.0)
    d_product = tl.zeros([CHUNK, CHUNK], tl.float32)
    for member in range(MEMBERS):
        head = part * MEMBERS + member
        first_step = head.to(tl.int64) * num_tokens + origin
        step = tl.load(steps + first_step + token, mask=live, other=0.0)
        decay = tl.load(decays + first_step + token, mask=live, other=0.0)
        last = tl.load(decays + first_step + tl.minimum(CHUNK, length - index * CHUNK) - 1)
        inputs = x + head * x_head_stride
        results = d_out + head * d_out_head_stride
        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        for first in tl.static_range(0, DIM_PADDED, BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)
            values = rows_of(inputs, place, live, row, x_token_stride, HEAD_DIM, BLOCK_ROWS)
            d_y = rows_of(results, place, live, row, d_out_token_stride, HEAD_DIM, BLOCK_ROWS)
            overlap = tl.dot(values, tl.trans(d_y), acc=overlap, input_precision=PRECISION)
        d_skip = tl.sum(tl.sum(tl.where(token[:, None] == token[None, :], overlap, 0.0), 1), 0)
        tl.store(head_sums + tile * 3 * NUM_HEADS + NUM_HEADS + head, d_skip)
        # Of later tokens, and of rows behind the last one, the difference would be positive without a bound.
        passed = tl.exp(tl.where(is_past, decay[None, :] - decay[:, None], float("-inf")))
        overlap *= passed
        d_product += overlap * step[:, None]
        overlap *= product.to(tl.float32)
        weights = (passed * product.to(tl.float32)).to(dtype)
        sums = by_token + first_step + token
        tl.store(sums, tl.sum(overlap, 1), mask=live)
        tl.store(sums + NUM_HEADS * num_tokens.to(tl.int64), tl.sum(overlap * step[:, None], 0), mask=live)
        added = tl.exp(tl.minimum(last - decay, 0.0))
        chunk = span_number(start, seq, index, head, NUM_HEADS, CHUNK) * 2 + 1
        for first in tl.static_range(0, DIM_PADDED, BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)
            inside = (row < HEAD_DIM)[:, None] & is_column[None, :]
            held = kept + chunk * HEAD_DIM * STATE_SIZE + row[:, None] * STATE_SIZE + column[None, :]
            d_state = tl.load(held, mask=inside, other=0.0)
            if DIM_PADDED > BLOCK_ROWS:
                d_y = rows_of(results, place, live, row, d_out_token_stride, HEAD_DIM, BLOCK_ROWS)
            found = tl.dot(b, tl.trans(d_state), input_precision=PRECISION) * added[:, None]
            found = tl.dot(weights, d_y, acc=found, input_precision=PRECISION) * step[:, None]
            if D is not None:
                found += tl.load(D + head).to(tl.float32) * d_y.to(tl.float32)
            target = d_x + origin * x_stride + head * HEAD_DIM + token[:, None] * x_stride + row[None, :]
            tl.store(target, found.to(d_x.dtype.element_ty), mask=live[:, None] & (row < HEAD_DIM)[None, :])
    square = token[:, None] * CHUNK + token[None, :]
    own = (tile * parts + part).to(tl.int64) * CHUNK * CHUNK
    tl.store(d_products + own + square, d_product.to(dtype))


@triton.jit
def mamba_group_gradients_kernel(
    x,
    B,
    C,
    d_out,
    query_start_loc,
    steps,
    decays,
    kept,
    d_products,
    by_token,
    d_lasts,
    d_B,
    d_C,
    num_tokens,
    num_seqs,
    x_token_stride,
    x_head_stride,
    B_token_stride,
    B_group_stride,
    C_token_stride,
    C_group_stride,
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, for C and for B; parts of MEMBERS heads of a group).

    Writes the gradient of C or of B as a sum over the part's heads in their order; for each token and head what it
    takes from S, or adds to dS, times the other; and for each chunk and head the product of S and dS.
    """
    back = tl.program_id(0) % 2
    tile = tl.program_id(0) // 2
    part = tl.program_id(1)
    parts: tl.constexpr = NUM_HEADS // MEMBERS
    column = tl.arange(0, STATE_PADDED)
    is_column = column < STATE_SIZE
    sums_stride: tl.constexpr = parts * STATE_SIZE
    own = part * STATE_SIZE + column
    zero_padding(d_B + own, query_start_loc, num_tokens, num_seqs, sums_stride, is_column, BLOCK_T)
    zero_padding(d_C + own, query_start_loc, num_tokens, num_seqs, sums_stride, is_column, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    origin = (start + index * CHUNK).to(tl.int64)
    place, live = tokens_of(start, index * CHUNK, length, CHUNK)
    group = part * MEMBERS // GROUP
    token = tl.arange(0, CHUNK)
    values = d_out
    values_stride = d_out_token_stride
    values_head_stride = d_out_head_stride
    weights = C + group * C_group_stride
    weights_stride = C_token_stride
    others = B + group * B_group_stride
    others_stride = B_token_stride
    target = d_C
    square = token[None, :] * CHUNK + token[:, None]
    if back == 1:
        values = x
        values_stride = x_token_stride
        values_head_stride = x_head_stride
        weights = B + group * B_group_stride
        weights_stride = B_token_stride
        others = C + group * C_group_stride
        others_stride = C_token_stride
        target = d_B
        square = token[:, None] * CHUNK + token[None, :]
    d_product = tl.load(d_products + (tile * parts + part).to(tl.int64) * CHUNK * CHUNK + square)
    other = rows_of(others, place, live, column, others_stride, STATE_SIZE, STATE_PADDED)
    gradient = tl.dot(d_product, other, input_precision=PRECISION)
    w = rows_of(weights, place, live, column, weights_stride, STATE_SIZE, STATE_PADDED)
    sums = by_token + (2 + back) * NUM_HEADS * num_tokens.to(tl.int64)
    for member in range(MEMBERS):
        head = part * MEMBERS + member
        first_step = head.to(tl.int64) * num_tokens + origin
        step = tl.load(steps + first_step + token, mask=live, other=0.0)
        decay = tl.load(decays + first_step + token, mask=live, other=0.0)
        last = tl.load(decays + first_step + tl.minimum(CHUNK, length - index * CHUNK) - 1)
        factor = tl.exp(tl.where(back == 1, tl.minimum(last - decay, 0.0), decay))
        chunk = span_number(start, seq, index, head, NUM_HEADS, CHUNK) * 2
        found = tl.zeros([CHUNK, STATE_PADDED], tl.float32)
        d_last = 0.0
        for first in range(0, DIM_PADDED, BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)
            inside = (row < HEAD_DIM)[:, None] & is_column[None, :]
            held = kept + chunk * HEAD_DIM * STATE_SIZE + row[:, None] * STATE_SIZE + column[None, :]
            state = tl.load(held + back * HEAD_DIM * STATE_SIZE, mask=inside, other=0.0)
            v = rows_of(values + head * values_head_stride, place, live, row, values_stride, HEAD_DIM, BLOCK_ROWS)
            found = tl.dot(v, state, acc=found, input_precision=PRECISION)
            if back == 1:
                before = tl.load(held, mask=inside, other=0.0)
                d_last += tl.sum(tl.sum(before.to(tl.float32) * state.to(tl.float32), 1), 0)
        tl.store(sums + first_step + token, tl.sum(found * w.to(tl.float32), 1) * factor, mask=live)
        if back == 1:
            tl.store(d_lasts + tile * NUM_HEADS + head, d_last * tl.exp(last))
            factor *= step
        gradient += found * factor[:, None]
    places = target + origin * sums_stride + token[:, None] * sums_stride + own[None, :]
    tl.store(places, gradient.to(target.dtype.element_ty), mask=live[:, None] & is_column[None, :])


@triton.jit
def mamba_step_gradients_kernel(
    dt,
    A,
    dt_bias,
    query_start_loc,
    steps,
    by_token,
    d_lasts,
    head_sums,
    d_dt,
    num_tokens,
    num_seqs,
    least_step,
    largest_step,
    dt_token_stride,
    NUM_HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, tiles of BLOCK_HEADS heads).

    Writes the gradient of dt, and for each chunk and head its part of those of A and dt_bias, in float32.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head < NUM_HEADS
    zero_padding(d_dt + head, query_start_loc, num_tokens, num_seqs, NUM_HEADS, is_head, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    place, live = tokens_of(start, index * CHUNK, tl.load(query_start_loc + seq + 1) - start, CHUNK)
    token = tl.arange(0, CHUNK)
    inside = live[:, None] & is_head[None, :]
    by_head = head.to(tl.int64)[None, :] * num_tokens + place[:, None]
    kind = NUM_HEADS * num_tokens.to(tl.int64)
    step = tl.load(steps + by_head, mask=inside, other=0.0)
    within = tl.load(by_token + by_head, mask=inside, other=0.0)
    read = tl.load(by_token + kind + by_head, mask=inside, other=0.0)
    by_read = tl.load(by_token + 2 * kind + by_head, mask=inside, other=0.0)
    by_state = tl.load(by_token + 3 * kind + by_head, mask=inside, other=0.0)
    d_last = tl.load(d_lasts + tile * NUM_HEADS + head, mask=is_head, other=0.0)
    d_last += tl.sum(by_state * step, 0)
    # Both sums within the chunk have the terms of a token with itself, in which there is no decay.
    d_decay = (read - within * step) + by_read - by_state * step
    d_decay += tl.where((token == CHUNK - 1)[:, None], d_last[None, :], 0.0)
    d_rate = tl.cumsum(d_decay, 0, reverse=True)
    rate = tl.load(A + head, mask=is_head, other=0.0).to(tl.float32)
    d_step = within + by_state + d_rate * rate[None, :]
    given = tl.load(dt + place[:, None] * dt_token_stride + head[None, :], mask=inside, other=0.0)
    known = tl.minimum(head, NUM_HEADS - 1)
    free = step_sizes(given, dt_bias, known[None, :], float("-inf"), float("inf"), SOFTPLUS)
    if SOFTPLUS:
        # The slope of the softplus s of a number is 1 - exp(-s), which has no digits of a small one.
        series = free * (1.0 - free * (1 / 2 - free * (1 / 6 - free * (1 / 24 - free * (1 / 120 - free / 720)))))
        d_step *= tl.where(free < 0.25, series, 1.0 - tl.exp(-free))
    d_step = tl.where(inside & (free >= least_step) & (free <= largest_step), d_step, 0.0)
    tl.store(d_dt + place[:, None] * NUM_HEADS + head[None, :], d_step.to(d_dt.dtype.element_ty), mask=inside)
    sums = head_sums + tile * 3 * NUM_HEADS + head
    tl.store(sums, tl.sum(d_rate * step, 0), mask=is_head)
    tl.store(sums + 2 * NUM_HEADS, tl.sum(d_step, 0), mask=is_head)


@triton.jit
def mamba_sums_kernel(
    query_start_loc,
    head_sums,
    B_sums,
    C_sums,
    d_A,
    d_D,
    d_dt_bias,
    d_B,
    d_C,
    num_tokens,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (tiles of BLOCK_T tokens, or 1 without parts; groups). Sums over chunks and over parts in their order."""
    group = tl.program_id(1)
    if tl.program_id(0) == 0:
        _, _, total = locate_tile(0, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
        for first in range(0, GROUP, BLOCK_HEADS):
            member = first + tl.arange(0, BLOCK_HEADS)
            head = group * GROUP + member
            _store_sum(d_A, head_sums, head, member < GROUP, total, NUM_HEADS, BLOCK_T)
            if d_D is not None:
                _store_sum(d_D, head_sums + NUM_HEADS, head, member < GROUP, total, NUM_HEADS, BLOCK_T)
            if d_dt_bias is not None:
                _store_sum(d_dt_bias, head_sums + 2 * NUM_HEADS, head, member < GROUP, total, NUM_HEADS, BLOCK_T)
    if B_sums is not None:
        parts: tl.constexpr = GROUP // MEMBERS
        token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        column = tl.arange(0, STATE_PADDED)
        inside = (token < num_tokens)[:, None] & (column < STATE_SIZE)[None, :]
        place = (token * NUM_GROUPS + group)[:, None]
        target = place * STATE_SIZE + column[None, :]
        d_b = tl.zeros([BLOCK_T, STATE_PADDED], tl.float32)
        d_c = tl.zeros([BLOCK_T, STATE_PADDED], tl.float32)
        for part in range(parts):
            source = (place * parts + part) * STATE_SIZE + column[None, :]
            d_b += tl.load(B_sums + source, mask=inside, other=0.0)
            d_c += tl.load(C_sums + source, mask=inside, other=0.0)
        tl.store(d_B + target, d_b.to(d_B.dtype.element_ty), mask=inside)
        tl.store(d_C + target, d_c.to(d_C.dtype.element_ty), mask=inside)


@triton.jit
def _store_sum(target, sums, head, is_head, total, NUM_HEADS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Stores the sum over chunks of a number of each head."""
    block: tl.constexpr = 4 * BLOCK_T
    found = tl.zeros(head.shape, tl.float32)
    for first in range(0, total, block):
        chunk = first + tl.arange(0, block)
        is_there = (chunk < total)[:, None] & is_head[None, :]
        found += tl.sum(tl.load(sums + chunk[:, None] * 3 * NUM_HEADS + head[None, :], mask=is_there, other=0.0), 0)
    tl.store(target + head, found.to(target.dtype.element_ty), mask=is_head)
