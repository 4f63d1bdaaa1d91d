"""The kernels of Mamba-2's state space model, chunk by chunk (SSD; Dao and Gu 2024, arXiv:2405.21060).

The results of a chunk are a product of the state before it, and a masked product of its own tokens. One kernel
computes for all chunks what does not depend on a state. The last one goes through the chunks of a sequence, or of a
span of it, holding rows of one head's state in registers. Spans run at the same time: another kernel first computes
the states that each of them ends with if it starts from zeros, and one passes these on from span to span.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import chunk_rows, load_state, store_state
from torch_core.device.work import locate_tile
from torch_core.state.kernels.mamba.kernel import rates_of, step_sizes

_LOG2E = tl.constexpr(1.4426950408889634)
# The largest power of two whose product with 0 is 0.
_MOST = tl.constexpr(126.0)


@triton.jit
def mamba_products_kernel(
    dt,
    A,
    B,
    C,
    dt_bias,
    query_start_loc,
    products,
    steps,
    decays,
    num_tokens,
    num_seqs,
    least_step,
    largest_step,
    dt_token_stride,
    B_token_stride,
    B_group_stride,
    C_token_stride,
    C_group_stride,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    LOG_RATES: tl.constexpr,
    PRECISION: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINARY: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, groups).

    Writes for each token the `products` of its C with B of its chunk's tokens, and for each of the group's heads its
    step size and the logarithm of the decay from the chunk's start on.

    With BINARY the products with later tokens are 0, logarithms are binary ones, and instead of its step size a token
    has the logarithm of the step size over its decay: what it adds to a later token, or to the state, is then one power
    of a sum of two numbers.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, MIN_TOKENS)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    place, live = tokens_of(start, index * CHUNK, tl.load(query_start_loc + seq + 1) - start, CHUNK)
    column = tl.arange(0, STATE_PADDED)
    b = rows_of(B + group * B_group_stride, place, live, column, B_token_stride, STATE_SIZE, STATE_PADDED)
    c = rows_of(C + group * C_group_stride, place, live, column, C_token_stride, STATE_SIZE, STATE_PADDED)
    target = products + (place * NUM_GROUPS + group)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    product = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    if BINARY:
        token = tl.arange(0, CHUNK)
        product = tl.where(token[:, None] >= token[None, :], product, 0.0)
    tl.store(target, product.to(products.dtype.element_ty), mask=live[:, None])
    for first in range(0, GROUP, BLOCK_HEADS):
        member = first + tl.arange(0, BLOCK_HEADS)
        head = group * GROUP + tl.minimum(member, GROUP - 1)
        is_value = live[:, None] & (member < GROUP)[None, :]
        values = dt + place[:, None] * dt_token_stride + DT_COLUMN + head[None, :]
        found = tl.load(values, mask=is_value, other=0.0)
        found = step_sizes(found, dt_bias, head[None, :], least_step, largest_step, SOFTPLUS)
        found = tl.where(is_value, found, 0.0)
        places = head.to(tl.int64)[None, :] * num_tokens + place[:, None]
        decay = found * rates_of(tl.load(A + head), LOG_RATES)[None, :]
        # exp(-128) is 0 in float32, and sums of larger numbers would lose the digits of later tokens.
        decay = tl.cumsum(tl.maximum(decay, -128.0, propagate_nan=tl.PropagateNan.ALL), 0)
        if BINARY:
            decay *= _LOG2E
            found = tl.log2(found) - decay
        tl.store(steps + places, found, mask=is_value)
        tl.store(decays + places, decay, mask=is_value)


@triton.jit
def mamba_span_states_kernel(
    x,
    B,
    query_start_loc,
    steps,
    decays,
    span_states,
    span_decays,
    num_tokens,
    num_seqs,
    x_token_stride: tl.constexpr,
    x_head_stride,
    B_token_stride: tl.constexpr,
    B_group_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid: (spans of the batch by a static bound, heads, tiles of BLOCK_ROWS rows of a state).

    Writes the state that each span ends with if it starts from zeros, and the logarithm of its decay. The last span of
    a sequence is left out.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, SPAN, MIN_TOKENS)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if (index + 1) * SPAN >= length:
        return

    column = tl.arange(0, STATE_PADDED)
    state = tl.zeros([STATE_PADDED, BLOCK_ROWS], tl.float32)
    total_decay = 0.0
    token = tl.arange(0, CHUNK).to(tl.int64)
    by_head = head.to(tl.int64) * num_tokens
    for first in range(index * SPAN, (index + 1) * SPAN, CHUNK):
        origin = (start + first).to(tl.int64)
        values = _chunk_rows(
            x + head * x_head_stride, origin, token, token, row, x_token_stride, False, HEAD_DIM, BLOCK_ROWS
        )
        b = _chunk_rows(
            B + head // GROUP * B_group_stride,
            origin,
            token,
            token,
            column,
            B_token_stride,
            False,
            STATE_SIZE,
            STATE_PADDED,
        )
        step = tl.load(steps + by_head + origin + token)
        last = tl.load(decays + by_head + origin + CHUNK - 1)
        state = _advanced(state, values, b, step, last)
        total_decay += last
    held, inside = _span_state(span_states, start, index, head, row, column, NUM_HEADS, HEAD_DIM, STATE_SIZE, SPAN)
    tl.store(held, state, mask=inside)
    tl.store(span_decays + _long_span_number(start, index, head, NUM_HEADS, SPAN), total_decay)


@triton.jit
def mamba_pass_kernel(
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    span_states,
    span_decays,
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
    """Grid: (sequences, heads, tiles of BLOCK_ROWS rows of a state).

    Replaces the state that each span ends with by the one that it starts from. Sequences of one span have none.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if length <= SPAN:
        return
    column = tl.arange(0, STATE_PADDED)
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[None, :], column[:, None], num_states,
        states_slot_stride, states_head_stride, states_row_stride, HEAD_DIM, STATE_SIZE,
    )  # fmt: skip
    count = (length + SPAN - 1) // SPAN
    for index in range(count):
        held, inside = _span_state(span_states, start, index, head, row, column, NUM_HEADS, HEAD_DIM, STATE_SIZE, SPAN)
        has_next = index + 1 < count
        ended = tl.load(held, mask=inside & has_next, other=0.0)
        decay = tl.load(span_decays + _long_span_number(start, index, head, NUM_HEADS, SPAN), mask=has_next, other=0.0)
        tl.store(held, state, mask=inside)
        state = state * tl.exp2(decay) + ended


@triton.jit
def mamba_scan_kernel(
    x,
    B,
    C,
    D,
    query_start_loc,
    cache_indices,
    has_initial_state,
    products,
    steps,
    decays,
    span_states,
    states,
    out,
    num_tokens,
    num_seqs,
    num_states,
    x_token_stride: tl.constexpr,
    x_head_stride,
    B_token_stride: tl.constexpr,
    B_group_stride,
    C_token_stride: tl.constexpr,
    C_group_stride,
    states_slot_stride,
    states_head_stride,
    states_row_stride: tl.constexpr,
    out_token_stride: tl.constexpr,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid: (spans of the batch by a static bound, heads, tiles of BLOCK_ROWS rows of a state)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, SPAN, MIN_TOKENS)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    column = tl.arange(0, STATE_PADDED)
    is_long = span_states is not None and length > SPAN
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[None, :], column[:, None],
        tl.where(is_long, 0, num_states), states_slot_stride, states_head_stride, states_row_stride, HEAD_DIM,
        STATE_SIZE,
    )  # fmt: skip
    if span_states is not None:
        held, inside = _span_state(span_states, start, index, head, row, column, NUM_HEADS, HEAD_DIM, STATE_SIZE, SPAN)
        state += tl.load(held, mask=inside & is_long, other=0.0)
    skip = 0.0
    if D is not None:
        skip += tl.load(D + head).to(tl.float32)
    end = tl.minimum((index + 1) * SPAN, length)
    dtype: tl.constexpr = x.dtype.element_ty
    group = head // GROUP
    token = tl.arange(0, CHUNK).to(tl.int64)
    for first in range(index * SPAN, end, CHUNK):
        count = tl.minimum(end - first, CHUNK)
        live = token < count
        origin = (start + first).to(tl.int64)
        by_head = head.to(tl.int64) * num_tokens + origin
        c = _chunk_rows(
            C + group * C_group_stride, origin, token, live, column, C_token_stride, True, STATE_SIZE, STATE_PADDED
        )
        found = tl.dot(c, state.to(dtype))
        product = products + (origin * NUM_GROUPS + group) * CHUNK
        product += token[:, None] * (NUM_GROUPS * CHUNK) + token[None, :]
        decay = tl.load(decays + by_head + token, mask=live, other=0.0)
        step = tl.load(steps + by_head + token, mask=live, other=float("-inf"))
        weights = tl.load(product, mask=live[:, None], other=0.0)
        found *= tl.exp2(decay)[:, None]
        # Of later tokens the power has no bound, but the product is 0.
        weights = weights.to(tl.float32) * tl.exp2(tl.minimum(decay[:, None] + step[None, :], _MOST))
        values = _chunk_rows(
            x + head * x_head_stride, origin, token, live, row, x_token_stride, True, HEAD_DIM, BLOCK_ROWS
        )
        found = tl.dot(weights.to(dtype), values, found)
        if D is not None:
            found += skip * values.to(tl.float32)
        places = out + origin * out_token_stride + head * out_head_stride
        places += token[:, None] * out_token_stride + row[None, :]
        tl.store(places, found.to(out.dtype.element_ty), mask=live[:, None] & (row < HEAD_DIM)[None, :])
        b = _chunk_rows(
            B + group * B_group_stride, origin, token, live, column, B_token_stride, True, STATE_SIZE, STATE_PADDED
        )
        state = _advanced(state, values, b, step, tl.load(decays + by_head + count - 1))
    if end == length:
        store_state(
            states, state, cache_indices, seq, head, row[None, :], column[:, None], num_states, states_slot_stride,
            states_head_stride, states_row_stride, HEAD_DIM, STATE_SIZE,
        )  # fmt: skip


@triton.jit
def tokens_of(start, first, length, CHUNK: tl.constexpr):
    """Returns the rows of a chunk, and whether the sequence has them."""
    token = first + tl.arange(0, CHUNK)
    return (start + token).to(tl.int64), token < length


@triton.jit
def rows_of(array, place, live, column, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    mask = live[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(array + place[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _chunk_rows(
    array, origin, token, live, column, stride, MASKED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns rows of a chunk, of those that are live if they are MASKED."""
    places = chunk_rows(array, origin, token, column, stride)
    if SIZE % BLOCK != 0:
        inside = (column < SIZE)[None, :]
        return tl.load(places, mask=inside & live[:, None] if MASKED else inside, other=0.0)
    if MASKED:
        return tl.load(places, mask=live[:, None], other=0.0)
    return tl.load(places)


@triton.jit
def _advanced(state, values, b, step, last):
    """Returns a state [columns, rows] after the tokens of a chunk."""
    scaled = values.to(tl.float32) * tl.exp2(last + step)[:, None]
    return tl.dot(tl.trans(b), scaled.to(b.dtype), state * tl.exp2(last))


@triton.jit
def _span_state(
    span_states, start, index, head, row, column, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Returns the places of a span's state [columns, rows], and which of them exist."""
    number = _long_span_number(start, index, head, NUM_HEADS, SPAN)
    places = span_states + (number * HEAD_DIM + row)[None, :] * STATE_SIZE + column[:, None]
    return places, (row < HEAD_DIM)[None, :] & (column < STATE_SIZE)[:, None]


@triton.jit
def _long_span_number(start, index, head, NUM_HEADS: tl.constexpr, SPAN: tl.constexpr):
    """Returns a number of a span and head of a sequence that has several spans, without a search.

    A sequence of n > SPAN tokens takes at most 2 * n // SPAN spans, as many as these numbers leave it.
    """
    return (2 * start // SPAN + index).to(tl.int64) * NUM_HEADS + head


@triton.jit
def span_number(start, seq, index, head, NUM_HEADS: tl.constexpr, SPAN: tl.constexpr):
    """Returns a number of a span and head that no other has, without a search.

    A sequence of n tokens takes at most n // SPAN + 1 spans, as many as these numbers leave it.
    """
    return (start // SPAN + seq + index).to(tl.int64) * NUM_HEADS + head
