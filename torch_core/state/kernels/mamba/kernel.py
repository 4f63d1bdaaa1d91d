"""The kernel of Mamba-2's state space model, token by token: a program keeps rows of one head's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, store_state, zero_padding


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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid: (sequences, heads, tiles of BLOCK_ROWS rows of a state). The first sequence's programs zero padded tokens.

    Sequences of more than MAX_TOKENS tokens are left out, unless it is 0.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, STATE_PADDED)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_column = column < STATE_SIZE
    is_row = row < HEAD_DIM
    results = out + head * out_head_stride + row
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if MAX_TOKENS > 0:
        length = tl.where(length > MAX_TOKENS, 0, length)
    kept = length
    if num_kept_tokens is not None:
        kept = tl.load(num_kept_tokens + seq)
    # No branch for a sequence that is left out: offsets and slots are then read together.
    num_states = tl.where(length > 0, num_states, 0)
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], column[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, HEAD_DIM, STATE_SIZE,
    )  # fmt: skip
    rate = tl.load(A + head).to(tl.float32)
    for index in range(length):
        place = start.to(tl.int64) + index
        value = tl.load(x + place * x_token_stride + head * x_head_stride + row, mask=is_row, other=0.0).to(tl.float32)
        weights = B + place * B_token_stride + head // GROUP * B_group_stride + column
        reads = C + place * C_token_stride + head // GROUP * C_group_stride + column
        b = tl.load(weights, mask=is_column, other=0.0).to(tl.float32)
        c = tl.load(reads, mask=is_column, other=0.0).to(tl.float32)
        step = step_sizes(
            tl.load(dt + place * dt_token_stride + head), dt_bias, head, least_step, largest_step, SOFTPLUS
        )
        state = state * tl.exp(step * rate) + (step * value)[:, None] * b[None, :]
        found = tl.sum(state * c[None, :], 1)
        if D is not None:
            found += tl.load(D + head).to(tl.float32) * value
        tl.store(results + place * out_token_stride, found.to(out.dtype.element_ty), mask=is_row)
        if num_kept_tokens is not None and index + 1 == kept:
            store_state(
                states, state, cache_indices, seq, head, row[:, None], column[None, :], num_states,
                states_slot_stride, states_head_stride, states_row_stride, HEAD_DIM, STATE_SIZE,
            )  # fmt: skip
    if num_kept_tokens is None:
        store_state(
            states, state, cache_indices, seq, head, row[:, None], column[None, :], num_states, states_slot_stride,
            states_head_stride, states_row_stride, HEAD_DIM, STATE_SIZE,
        )  # fmt: skip
    # Last, because the first sequence's programs would wait for one more offset before their loads.
    zero_padding(results, query_start_loc, num_tokens, num_seqs, out_token_stride, is_row, BLOCK_T)


@triton.jit
def step_sizes(dt, dt_bias, heads, least, largest, SOFTPLUS: tl.constexpr):
    """Returns the step sizes of dt, in float32."""
    steps = dt.to(tl.float32)
    if dt_bias is not None:
        steps += tl.load(dt_bias + heads).to(tl.float32)
    if SOFTPLUS:
        # log(1 + e) is e * log(u) / (u - 1) for u = 1 + e as it is rounded: exact for small e, too.
        e = tl.exp(tl.minimum(steps, 20.0))
        u = 1.0 + e
        steps = tl.where(steps > 20.0, steps, tl.where(u == 1.0, e, e * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.minimum(tl.maximum(steps, least), largest)
