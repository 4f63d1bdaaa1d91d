"""The kernel of Mamba-2's state space model, token by token: a program keeps rows of one head's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import zero_rows


@triton.jit
def mamba_step_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    query_start_loc,
    cache_indices,
    has_initial_state,
    num_kept_tokens,
    states,
    out,
    num_tokens,
    num_seqs,
    num_states,
    least_step,
    largest_step,
    x_token_stride,
    x_head_stride,
    dt_token_stride,
    B_token_stride,
    B_group_stride,
    C_token_stride,
    C_group_stride,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    LOG_RATES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid: tiles of BLOCK_ROWS rows of a state, of all heads, of all sequences: the order in which states lie.

    The first sequence's programs zero padded tokens. Sequences of more than MAX_TOKENS tokens are left out, unless it
    is 0; with ONE_TOKEN none has more than one.
    """
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_ROWS - 1) // BLOCK_ROWS
    COLUMNS: tl.constexpr = STATE_PADDED if STATE_PADDED < 32 else 32
    program = tl.program_id(0)
    head = program // TILES % NUM_HEADS
    seq = program // (TILES * NUM_HEADS)
    # Parts of a row along the first axis: a thread then holds columns of all parts, and adds them without a shuffle.
    column = tl.arange(0, STATE_PADDED // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = program % TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_column = column < STATE_SIZE
    is_row = row < HEAD_DIM
    results = out + head * out_head_stride + row
    # What a slot's address and the step size need is asked for at once, and waited for once: the compiler would use the
    # first of it before it loads the rest.
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    kept = length
    if num_kept_tokens is not None:
        kept = tl.load(num_kept_tokens + seq)
    rate = rates_of(tl.load(A + head), LOG_RATES)
    skip = 0.0
    if D is not None:
        skip += tl.load(D + head).to(tl.float32)
    bias = 0.0
    if dt_bias is not None:
        bias += tl.load(dt_bias + head).to(tl.float32)
    slot = seq
    is_read = seq >= 0
    if states is not None:
        if cache_indices is not None:
            slot = tl.load(cache_indices + seq)
        if has_initial_state is not None:
            is_read = tl.load(has_initial_state + seq) != 0
    if ONE_TOKEN:
        tl.debug_barrier()
    if MAX_TOKENS > 0:
        length = tl.where(length > MAX_TOKENS, 0, length)
    is_token = length > 0
    inside = is_row[:, None, None] & is_column[None, :, :] & (slot >= 0) & (slot < num_states) & is_token
    state = tl.zeros(inside.shape, tl.float32)
    if states is not None:
        held = states + slot.to(tl.int64) * states_slot_stride + head * states_head_stride
        held = held + row[:, None, None] * states_row_stride + column[None, :, :]
        state = tl.load(held, mask=inside & is_read, other=0.0).to(tl.float32)
    # On its way before anything waits for the step size.
    if ONE_TOKEN:
        tl.debug_barrier()
    place = start.to(tl.int64)
    values = x + place * x_token_stride + head * x_head_stride + row
    weights = B + place * B_token_stride + head // GROUP * B_group_stride + column
    reads = C + place * C_token_stride + head // GROUP * C_group_stride + column
    gates = dt + place * dt_token_stride + DT_COLUMN + head
    next_dt = tl.load(gates, mask=is_token, other=0.0)
    next_b = tl.load(weights, mask=is_column & is_token, other=0.0)
    next_c = tl.load(reads, mask=is_column & is_token, other=0.0)
    next_x = tl.load(values, mask=is_row & is_token, other=0.0)
    for index in range(1 if ONE_TOKEN else length):
        b = next_b.to(tl.float32)
        c = next_c.to(tl.float32)
        value = next_x.to(tl.float32)
        step = step_sizes(next_dt.to(tl.float32) + bias, None, head, least_step, largest_step, SOFTPLUS)
        if not ONE_TOKEN:
            # The next token is on its way while this one is computed.
            is_next = index + 1 < length
            gates += dt_token_stride
            weights += B_token_stride
            reads += C_token_stride
            values += x_token_stride
            next_dt = tl.load(gates, mask=is_next, other=0.0)
            next_b = tl.load(weights, mask=is_column & is_next, other=0.0)
            next_c = tl.load(reads, mask=is_column & is_next, other=0.0)
            next_x = tl.load(values, mask=is_row & is_next, other=0.0)
        state = state * tl.exp(step * rate) + (step * value)[:, None, None] * b[None, :, :]
        if states is not None and (ONE_TOKEN or num_kept_tokens is not None):
            tl.store(held, state.to(states.dtype.element_ty), mask=inside & (index + 1 == kept))
        found = tl.sum(tl.sum(state * c[None, :, :], 1), 1)
        if D is not None:
            found += skip * value
        tl.store(
            results + (place + index) * out_token_stride, found.to(out.dtype.element_ty), mask=is_row & is_token
        )  # fmt: skip
    if states is not None and not ONE_TOKEN and num_kept_tokens is None:
        tl.store(held, state.to(states.dtype.element_ty), mask=inside)
    # Last, because the first sequence's programs would wait for one more offset before their loads.
    if seq == 0:
        zero_rows(results, query_start_loc, num_tokens, num_seqs, out_token_stride, is_row, BLOCK_T)


@triton.jit
def rates_of(rates, LOG_RATES: tl.constexpr):
    """Returns the rates of A in float32."""
    rates = rates.to(tl.float32)
    if LOG_RATES:
        rates = -tl.exp(rates)
    return rates


@triton.jit
def step_sizes(dt, dt_bias, heads, least, largest, SOFTPLUS: tl.constexpr):
    """Returns the step sizes of dt, in float32; NaN of NaN, which the instructions of a least number would drop."""
    steps = dt.to(tl.float32)
    if dt_bias is not None:
        steps += tl.load(dt_bias + heads).to(tl.float32)
    if SOFTPLUS:
        # log(1 + e) is e * log(u) / (u - 1) for u = 1 + e as it is rounded: exact for small e, too.
        e = tl.exp(tl.minimum(steps, 20.0, propagate_nan=tl.PropagateNan.ALL))
        u = 1.0 + e
        steps = tl.where(steps > 20.0, steps, tl.where(u == 1.0, e, e * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.clamp(steps, least, largest, propagate_nan=tl.PropagateNan.ALL)
