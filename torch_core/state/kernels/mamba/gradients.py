"""The derivative of Mamba-2's state space model: the gradients of tokens, of all chunks at the same time.

With the names of `backward.py`, and P[t, i] = exp(L[t] - L[i]) for i <= t: the gradient of x[i] is step[i] times the
sum over t of P[t, i] (C[t] B[i]) dy[t], and of exp(L[end] - L[i]) dS B[i]. Those of B and C are products with P[t, i]
(dy[t] x[i]), whose sum over the heads of a group is multiplied once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import zero_padding
from torch_core.device.work import locate_tile
from torch_core.state.kernels.mamba.chunks import rows_of, span_number, tokens_of
from torch_core.state.kernels.mamba.kernel import step_sizes


@triton.jit
def mamba_gradients_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    d_out,
    query_start_loc,
    products,
    steps,
    decays,
    kept,
    d_x,
    d_dt,
    d_B,
    d_C,
    head_sums,
    num_tokens,
    num_seqs,
    least_step,
    largest_step,
    x_token_stride,
    x_head_stride,
    dt_token_stride,
    B_token_stride,
    B_group_stride,
    C_token_stride,
    C_group_stride,
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
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, parts of MEMBERS heads of a group).

    Writes the gradients of tokens, those of B and C as sums over the part's heads in their order; and for each chunk
    and head its part of the gradients of A, D and dt_bias, in float32.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    parts: tl.constexpr = NUM_HEADS // MEMBERS
    column = tl.arange(0, STATE_PADDED)
    sums_stride: tl.constexpr = parts * STATE_SIZE
    is_column = column < STATE_SIZE
    own = part * STATE_SIZE + column
    zero_padding(d_B + own, query_start_loc, num_tokens, num_seqs, sums_stride, is_column, BLOCK_T)
    zero_padding(d_C + own, query_start_loc, num_tokens, num_seqs, sums_stride, is_column, BLOCK_T)
    x_stride: tl.constexpr = NUM_HEADS * HEAD_DIM
    element = tl.arange(0, DIM_PADDED)
    one = tl.arange(0, 1)
    for member in range(MEMBERS):
        head = part * MEMBERS + member
        d_values = d_x + head * HEAD_DIM + element
        zero_padding(d_values, query_start_loc, num_tokens, num_seqs, x_stride, element < HEAD_DIM, BLOCK_T)
        zero_padding(d_dt + head + one, query_start_loc, num_tokens, num_seqs, NUM_HEADS, one == 0, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    # Addresses are a scalar and offsets of 32 bits where strides are known: registers are scarce.
    origin = (start + index * CHUNK).to(tl.int64)
    place, live = tokens_of(start, index * CHUNK, length, CHUNK)
    group = part * MEMBERS // GROUP
    b = rows_of(B + group * B_group_stride, place, live, column, B_token_stride, STATE_SIZE, STATE_PADDED)
    c = rows_of(C + group * C_group_stride, place, live, column, C_token_stride, STATE_SIZE, STATE_PADDED)
    token = tl.arange(0, CHUNK)
    is_past = token[:, None] >= token[None, :]
    product = products + (origin * NUM_GROUPS + group) * CHUNK + token[:, None] * NUM_GROUPS * CHUNK + token[None, :]
    d_product = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_b = tl.zeros([CHUNK, STATE_PADDED], tl.float32)
    d_c = tl.zeros([CHUNK, STATE_PADDED], tl.float32)
    for member in range(MEMBERS):
        head = part * MEMBERS + member
        first_step = head.to(tl.int64) * num_tokens + origin
        step = tl.load(steps + first_step + token, mask=live, other=0.0)
        decay = tl.load(decays + first_step + token, mask=live, other=0.0)
        last = tl.load(decays + first_step + tl.minimum(CHUNK, length - index * CHUNK) - 1)
        inputs = x + head * x_head_stride
        results = d_out + head * d_out_head_stride
        # In a loop of its own: registers are scarce.
        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        for first in range(0, DIM_PADDED, BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)
            values = rows_of(inputs, place, live, row, x_token_stride, HEAD_DIM, BLOCK_ROWS)
            d_y = rows_of(results, place, live, row, d_out_token_stride, HEAD_DIM, BLOCK_ROWS)
            overlap = tl.dot(d_y, tl.trans(values), acc=overlap, input_precision=PRECISION)
        d_skip = tl.sum(tl.sum(tl.where(token[:, None] == token[None, :], overlap, 0.0), 1), 0)
        # Of later tokens, and of rows behind the last one, the difference would be positive without a bound.
        passed = tl.exp(tl.where(is_past & live[:, None], decay[:, None] - decay[None, :], float("-inf")))
        d_product += overlap * passed * step[None, :]
        passed *= tl.load(product, mask=live[:, None], other=0.0).to(tl.float32)
        weights = passed.to(dtype)
        overlap *= passed
        d_step = tl.sum(overlap, 0)
        # Both sums have the terms of a token with itself, in which there is no decay.
        d_decay = tl.sum(overlap * step[None, :], 1) - d_step * step
        into = tl.exp(decay)
        added = tl.exp(tl.minimum(last - decay, 0.0))
        d_last = 0.0
        by_state = tl.zeros([CHUNK], tl.float32)
        by_read = tl.zeros([CHUNK], tl.float32)
        chunk = span_number(start, seq, index, head, NUM_HEADS, CHUNK) * 2
        for first in range(0, DIM_PADDED, BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)
            inside = (row < HEAD_DIM)[:, None] & is_column[None, :]
            held = kept + chunk * HEAD_DIM * STATE_SIZE + row[:, None] * STATE_SIZE + column[None, :]
            state = tl.load(held, mask=inside, other=0.0)
            d_state = tl.load(held + HEAD_DIM * STATE_SIZE, mask=inside, other=0.0)
            values = rows_of(inputs, place, live, row, x_token_stride, HEAD_DIM, BLOCK_ROWS)
            d_y = rows_of(results, place, live, row, d_out_token_stride, HEAD_DIM, BLOCK_ROWS)
            d_last += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
            found = tl.dot(c, tl.trans(state), input_precision=PRECISION)
            by_read += tl.sum(found * d_y.to(tl.float32), 1)
            found = tl.dot(b, tl.trans(d_state), input_precision=PRECISION) * added[:, None]
            by_state += tl.sum(found * values.to(tl.float32), 1)
            found = tl.dot(tl.trans(weights), d_y, acc=found, input_precision=PRECISION) * step[:, None]
            if D is not None:
                found += tl.load(D + head).to(tl.float32) * d_y.to(tl.float32)
            target = d_x + origin * x_stride + head * HEAD_DIM + token[:, None] * x_stride + row[None, :]
            tl.store(target, found.to(d_x.dtype.element_ty), mask=live[:, None] & (row < HEAD_DIM)[None, :])
            d_y = (d_y.to(tl.float32) * into[:, None]).to(dtype)
            d_c = tl.dot(d_y, state, acc=d_c, input_precision=PRECISION)
            values = (values.to(tl.float32) * (added * step)[:, None]).to(dtype)
            d_b = tl.dot(values, d_state, acc=d_b, input_precision=PRECISION)
        d_step += by_state
        by_state *= step
        d_last = tl.exp(last) * d_last + tl.sum(by_state, 0)
        d_decay += by_read * into - by_state + tl.where(token == CHUNK - 1, d_last, 0.0)
        d_rate = tl.cumsum(d_decay, 0, reverse=True)
        d_step += d_rate * tl.load(A + head).to(tl.float32)
        given = tl.load(dt + origin * dt_token_stride + head + token * dt_token_stride, mask=live, other=0.0)
        free = step_sizes(given, dt_bias, head, float("-inf"), float("inf"), SOFTPLUS)
        if SOFTPLUS:
            # The slope of the softplus s of a number is 1 - exp(-s), which has no digits of a small one.
            series = free * (1.0 - free * (1 / 2 - free * (1 / 6 - free * (1 / 24 - free * (1 / 120 - free / 720)))))
            d_step *= tl.where(free < 0.25, series, 1.0 - tl.exp(-free))
        d_step = tl.where(live & (free >= least_step) & (free <= largest_step), d_step, 0.0)
        tl.store(d_dt + origin * NUM_HEADS + head + token * NUM_HEADS, d_step.to(d_dt.dtype.element_ty), mask=live)
        sums = head_sums + tile * 3 * NUM_HEADS + head
        tl.store(sums, tl.sum(d_rate * step, 0))
        tl.store(sums + NUM_HEADS, d_skip)
        tl.store(sums + 2 * NUM_HEADS, tl.sum(d_step, 0))
    d_product = d_product.to(dtype)
    d_c = tl.dot(d_product, b, acc=d_c, input_precision=PRECISION)
    d_b = tl.dot(tl.trans(d_product), c, acc=d_b, input_precision=PRECISION)
    target = origin * sums_stride + token[:, None] * sums_stride + own[None, :]
    is_sum = live[:, None] & is_column[None, :]
    tl.store(d_B + target, d_b.to(d_B.dtype.element_ty), mask=is_sum)
    tl.store(d_C + target, d_c.to(d_C.dtype.element_ty), mask=is_sum)


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
