"""The derivative of Mamba-2's state space model: states forwards and their gradients backwards through the chunks.

With S the state before a chunk, dS the gradient of the state after it and L[t] the logarithm of the decay from its
start to token t: S becomes exp(L[end]) S + sum of exp(L[end] - L[i]) step[i] x[i] B[i]^T, and dS becomes exp(L[end]) dS
+ sum of exp(L[t]) dy[t] C[t]^T. One kernel does both. Long sequences are cut into spans that run at the same time, as
in the forward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state
from torch_core.device.work import locate_tile
from torch_core.state.kernels.mamba.chunks import rows_of, span_number, tokens_of


@triton.jit
def mamba_both_states_kernel(
    x,
    B,
    C,
    d_out,
    d_last,
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    steps,
    decays,
    span_states,
    span_decays,
    d_initial,
    kept,
    num_tokens,
    num_seqs,
    num_states,
    x_token_stride,
    x_head_stride,
    B_token_stride,
    B_group_stride,
    C_token_stride,
    C_group_stride,
    d_out_token_stride,
    d_out_head_stride,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid: (spans, heads, tiles of BLOCK_ROWS rows for S and then for dS).

    Without spans `span_states` is absent, and there is one program for each sequence. Without `kept`, writes what each
    span but the last one adds to the state, and the logarithm of its decay. With it, writes S before each chunk and dS
    after it, and the gradient of the first state.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row_tiles: tl.constexpr = (HEAD_DIM + BLOCK_ROWS - 1) // BLOCK_ROWS
    back = tl.program_id(2) // row_tiles
    row = tl.program_id(2) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, STATE_PADDED)
    inside = (row < HEAD_DIM)[:, None] & (column < STATE_SIZE)[None, :]
    square = row[:, None] * STATE_SIZE + column[None, :]
    seq = tile
    span = 0
    if span_states is not None:
        seq, span, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, SPAN, 1)
        if tile >= total:
            return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    is_first = span == 0
    is_end = (span + 1) * SPAN >= length
    own = span_number(start, seq, span, head, NUM_HEADS, SPAN) * 2 + back
    state = tl.zeros([BLOCK_ROWS, STATE_PADDED], tl.float32)
    if kept is None:
        if (back == 0 and is_end) or (back == 1 and is_first):
            return
    elif span_states is not None:
        state = tl.load(span_states + own * HEAD_DIM * STATE_SIZE + square, mask=inside, other=0.0)
    else:
        state = first_state(
            states, cache_indices, has_initial_state, d_last, seq, head, back, row, column, num_states,
            states_slot_stride, states_head_stride, states_row_stride, NUM_HEADS, HEAD_DIM, STATE_SIZE,
        )  # fmt: skip

    dtype: tl.constexpr = x.dtype.element_ty
    values = x + head * x_head_stride
    values_stride = x_token_stride
    weights = B + head // GROUP * B_group_stride
    weights_stride = B_token_stride
    if back == 1:
        values = d_out + head * d_out_head_stride
        values_stride = d_out_token_stride
        weights = C + head // GROUP * C_group_stride
        weights_stride = C_token_stride
    end = tl.minimum((span + 1) * SPAN, length)
    count = (end - span * SPAN + CHUNK - 1) // CHUNK
    first_step = head.to(tl.int64) * num_tokens
    total_decay = 0.0
    for done in range(count):
        index = span * (SPAN // CHUNK) + (count - 1 - done if back == 1 else done)
        if kept is not None:
            chunk = span_number(start, seq, index, head, NUM_HEADS, CHUNK) * 2 + back
            tl.store(kept + chunk * HEAD_DIM * STATE_SIZE + square, state.to(dtype), mask=inside)
        place, live = tokens_of(start, index * CHUNK, length, CHUNK)
        v = rows_of(values, place, live, row, values_stride, HEAD_DIM, BLOCK_ROWS)
        w = rows_of(weights, place, live, column, weights_stride, STATE_SIZE, STATE_PADDED)
        step = tl.load(steps + first_step + place, mask=live, other=0.0)
        decay = tl.load(decays + first_step + place, mask=live, other=0.0)
        last = tl.load(decays + first_step + start + tl.minimum((index + 1) * CHUNK, length) - 1)
        factor = tl.exp(decay) if back == 1 else tl.exp(last - decay) * step
        scaled = (v.to(tl.float32) * factor[:, None]).to(dtype)
        state = tl.dot(tl.trans(scaled), w, acc=state * tl.exp(last), input_precision=PRECISION)
        total_decay += last
    if kept is None:
        tl.store(span_states + own * HEAD_DIM * STATE_SIZE + square, state, mask=inside)
        tl.store(span_decays + own, total_decay)
    elif d_initial is not None:  # noqa: SIM102, without it nothing is compiled
        if back == 1 and is_first:
            whole = (seq * NUM_HEADS + head).to(tl.int64) * HEAD_DIM * STATE_SIZE
            tl.store(d_initial + whole + square, state, mask=inside)


@triton.jit
def mamba_pass_both_kernel(
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    d_last,
    span_decays,
    span_states,
    d_initial,
    num_states,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid: (sequences, heads, tiles of BLOCK_ROWS rows for S and then for dS).

    Replaces what each span adds to the state by the state that it starts from, dS from the last span on. Writes the
    gradient of the first state of sequences without tokens.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row_tiles: tl.constexpr = (HEAD_DIM + BLOCK_ROWS - 1) // BLOCK_ROWS
    back = tl.program_id(2) // row_tiles
    row = tl.program_id(2) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, STATE_PADDED)
    inside = (row < HEAD_DIM)[:, None] & (column < STATE_SIZE)[None, :]
    square = row[:, None] * STATE_SIZE + column[None, :]
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    state = first_state(
        states, cache_indices, has_initial_state, d_last, seq, head, back, row, column, num_states,
        states_slot_stride, states_head_stride, states_row_stride, NUM_HEADS, HEAD_DIM, STATE_SIZE,
    )  # fmt: skip
    count = (length + SPAN - 1) // SPAN
    for done in range(count):
        span = count - 1 - done if back == 1 else done
        own = span_number(start, seq, span, head, NUM_HEADS, SPAN) * 2 + back
        held = span_states + own * HEAD_DIM * STATE_SIZE + square
        has_next = done + 1 < count
        added = tl.load(held, mask=inside & has_next, other=0.0)
        decay = tl.load(span_decays + own, mask=has_next, other=0.0)
        tl.store(held, state, mask=inside)
        state = state * tl.exp(decay) + added
    if d_initial is not None:  # noqa: SIM102, without it nothing is compiled
        if back == 1 and count == 0:
            whole = (seq * NUM_HEADS + head).to(tl.int64) * HEAD_DIM * STATE_SIZE
            tl.store(d_initial + whole + square, state, mask=inside)


@triton.jit
def first_state(
    states, cache_indices, has_initial_state, d_last, seq, head, back, row, column, num_states, slot_stride,
    head_stride, row_stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
):  # fmt: skip
    """Returns S before a sequence, or dS after it, [rows, columns], in float32."""
    inside = (row < HEAD_DIM)[:, None] & (column < STATE_SIZE)[None, :]
    state = tl.zeros(inside.shape, tl.float32)
    if back == 0:
        state += load_state(
            states, cache_indices, has_initial_state, seq, head, row[:, None], column[None, :], num_states,
            slot_stride, head_stride, row_stride, HEAD_DIM, STATE_SIZE,
        )  # fmt: skip
    elif d_last is not None:
        whole = (seq * NUM_HEADS + head).to(tl.int64) * HEAD_DIM * STATE_SIZE
        held = d_last + whole + row[:, None] * STATE_SIZE + column[None, :]
        state += tl.load(held, mask=inside, other=0.0).to(tl.float32)
    return state
