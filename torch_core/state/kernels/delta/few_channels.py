"""A few decoded tokens of a sequence with gates of channels: turns of four tokens; see `few.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_core.device.mask import LOG2E
from torch_core.state.kernels.delta.few import (
    ADDED,
    IN_COLUMNS,
    IN_ROWS,
    KEY_SIZE,
    LONG_STATE,
    PRODUCT,
    READ,
    RIGHT,
    STATE,
    high_part,
    in_fours,
    parts_of,
    rows_of,
    state_after,
    zero_padding,
)

#: Tokens of a turn.
TURN = gl.constexpr(4)
# A token's channels; all parts of each of 32 sums in one lane; sums where each thread reads them.
_CHANNELS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [], [], [32, 32]
    )
)
_BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout([[1, 0], [2, 0], [0, 1]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [], [], [4, 8])
)


class _Tokens(NamedTuple):
    """Where a sequence's tokens are, from the first one on."""

    query: Any
    key: Any
    value: Any
    beta: Any
    gate: Any
    out: Any


@gluon.jit
def gated_delta_few_by_channel_kernel(
    query,
    key,
    value,
    beta,
    gk,
    query_start_loc,
    cache_indices,
    has_initial_state,
    num_kept_tokens,
    states,
    out,
    num_tokens,
    num_seqs,
    num_states,
    scale,
    epsilon,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    NORMALIZE: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_V: gl.constexpr,
    TOKEN_STRIDES: gl.constexpr,
    HEAD_STRIDES: gl.constexpr,
    STATE_STRIDES: gl.constexpr,
):
    """Grid and parameters are those of `gated_delta_few_kernel`; more than TURN tokens are taken turn by turn."""
    LAYOUT: gl.constexpr = STATE if BLOCK_V == 16 else LONG_STATE
    rows = rows_of(
        query_start_loc, cache_indices, has_initial_state, num_kept_tokens, states, num_states, NUM_HEADS, VALUE_SIZE,
        BLOCK_V, LAYOUT, STATE_STRIDES,
    )  # fmt: skip
    state = gl.load(rows.held, mask=rows.is_read, other=0.0).to(gl.float32)
    head = rows.head
    length = rows.length
    row = (rows.first + gl.arange(0, BLOCK_V, IN_ROWS))[:, None]
    is_row = row < VALUE_SIZE
    results = out + head * HEAD_STRIDES[5] + row
    place = rows.start.to(gl.int64)
    tokens = _Tokens(
        query + place * TOKEN_STRIDES[0] + head // GROUP * HEAD_STRIDES[0],
        key + place * TOKEN_STRIDES[1] + head // GROUP * HEAD_STRIDES[1],
        value + place * TOKEN_STRIDES[2] + head * HEAD_STRIDES[2] + row,
        beta + place * TOKEN_STRIDES[3] + head,
        gk + place * TOKEN_STRIDES[4] + head * HEAD_STRIDES[4],
        results + place * TOKEN_STRIDES[5],
    )
    if STEPS <= TURN and num_kept_tokens is None:
        state = _turn(state, tokens, 0, length, length > 0, is_row, scale, epsilon, TOKEN_STRIDES, NORMALIZE, LAYOUT)
        gl.store(rows.held, state.to(states.dtype.element_ty), mask=rows.is_held)
    else:
        first = length * 0
        while first < length:
            # A turn ends after the last kept token.
            end = gl.minimum(first + TURN, gl.where(first < rows.kept, rows.kept, length))
            goes_on = (end < length) | (end == rows.kept)
            state = _turn(state, tokens, first, end, goes_on, is_row, scale, epsilon, TOKEN_STRIDES, NORMALIZE, LAYOUT)
            gl.store(rows.held, state.to(states.dtype.element_ty), mask=rows.is_held & (end == rows.kept))
            first = end
    zero_padding(results, is_row, rows, query_start_loc, num_tokens, num_seqs, TOKEN_STRIDES)


@gluon.jit
def _turn(
    state, tokens, first, end, goes_on, is_row, scale, epsilon, STRIDES: gl.constexpr, NORMALIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Stores the results of tokens `first` to `end`, at most four, and returns the state after them if it `goes_on`."""
    # Columns of products: keys of four tokens, then their queries.
    column = gl.arange(0, 8, IN_COLUMNS)
    is_key = column < 4
    token = first + column % 4
    is_token = token < end
    is_value = is_row & (is_token & is_key)[None, :]
    v = gl.load(tokens.value + token[None, :] * STRIDES[2], mask=is_value, other=0.0)
    rate = gl.load(tokens.beta + token * STRIDES[3], mask=is_token & is_key, other=0.0)
    read, by_key, squares, added, decay = _by_channel(tokens, first, end, column, STRIDES)
    norm = gl.full([8], 1.0, gl.float32, IN_COLUMNS)
    if NORMALIZE:
        norm = 1 / gl.sqrt(squares + epsilon)
    rate = rate.to(gl.float32) * norm
    v = v.to(gl.float32) * rate[None, :]
    rate = (rate * norm)[None, :]
    right = gl.convert_layout(in_fours(read).permute([1, 0]), RIGHT)
    right_high = high_part(right)
    high, low = parts_of(state)
    # What each key and query reads, first of the state before the turn, then of each after one more token.
    found = gl.zeros([state.shape[0], 8], gl.float32, PRODUCT)
    found = mma_v2(high, right - right_high, found, "tf32")
    found = mma_v2(high, right_high, found, "tf32") + mma_v2(low, right_high, gl.zeros_like(found), "tf32")
    errors = gl.zeros([state.shape[0], 8], gl.float32, PRODUCT)
    results = errors
    for step in gl.static_range(TURN):
        error = gl.sum(gl.where((column == step)[None, :], v - rate * found, 0.0), 1)[:, None]
        found += error * by_key[step][None, :]
        results = gl.where((column == step + 4)[None, :], found, results)
        # Both halves: the second one has the low parts of keys.
        errors = gl.where((column % 4 == step)[None, :], error, errors)
    results = (results * (norm * scale)[None, :]).to(tokens.out.dtype.element_ty)
    is_result = is_row & (is_token & (column >= 4))[None, :]
    gl.store(tokens.out + token[None, :] * STRIDES[5], results, mask=is_result)
    if goes_on:
        state = state_after(state, gl.convert_layout(decay, gl.SliceLayout(0, LAYOUT))[None, :], errors, added, LAYOUT)
    return state


@gluon.jit
def _by_channel(tokens, first, end, column, STRIDES: gl.constexpr):
    """Returns what `_turn` needs of a turn's keys and queries, with decays by channel, none of which exceeds 1.

    Keys and queries as the state before the turn sees them; the products of each key with later keys and queries; the
    squares of keys and queries; the high and low parts of keys as the state after the turn does, and its decay.
    """
    channel = gl.arange(0, KEY_SIZE, _CHANNELS)
    keys = ()
    queries = ()
    factors = ()
    for step in gl.static_range(TURN):
        token = first + step
        is_token = token < end
        k = gl.load(tokens.key + token * STRIDES[1] + channel, mask=is_token, other=0.0)
        q = gl.load(tokens.query + token * STRIDES[0] + channel, mask=is_token, other=0.0)
        gate = gl.load(tokens.gate + token * STRIDES[4] + channel, mask=is_token, other=0.0)
        keys += (k.to(gl.float32),)
        queries += (q.to(gl.float32),)
        factors += (gl.exp2(gate.to(gl.float32) * LOG2E),)
    seen = ()
    seen_queries = ()
    decay = factors[0]
    for step in gl.static_range(TURN):
        if step > 0:
            decay = decay * factors[step]
        seen += (keys[step] * decay,)
        seen_queries += (queries[step] * decay,)
    read = gl.join(_four(seen), _four(seen_queries)).permute([3, 2, 1, 0]).reshape([8, KEY_SIZE])
    passed = ()
    products = ()
    for step in gl.static_range(TURN):
        k = keys[step]
        with_keys = ()
        with_queries = ()
        # Earlier tokens need no products: their places have the squares.
        for other in gl.static_range(TURN):
            if other > step:
                k = k * factors[other]
            with_keys += (_part(k, keys[other] if other > step else k),)
            with_queries += (_part(k if other >= step else queries[other], queries[other]),)
        passed += (k,)
        products += (gl.join(_four(with_keys), _four(with_queries)),)
    sums = _four(products).permute([0, 5, 4, 3, 2, 1]).reshape([32, 32])
    sums = gl.sum(gl.convert_layout(sums, _SUMS), 0).reshape([4, 8])
    sums = gl.convert_layout(sums, _BY_KEY).reshape([2, 2, 8]).permute([2, 1, 0])
    left, right = gl.split(sums)
    row_0, row_1 = gl.split(left)
    row_2, row_3 = gl.split(right)
    row_0 = gl.convert_layout(row_0, IN_COLUMNS)
    row_1 = gl.convert_layout(row_1, IN_COLUMNS)
    row_2 = gl.convert_layout(row_2, IN_COLUMNS)
    row_3 = gl.convert_layout(row_3, IN_COLUMNS)
    squares = gl.where(column == 0, row_0, gl.where(column == 1, row_1, gl.where(column == 2, row_2, row_3)))
    squares = gl.where(column == 7, gl.sum(queries[3] * queries[3], 0), squares)
    added = _four(passed)
    high = high_part(added)
    added = gl.join(high, added - high).permute([3, 2, 1, 0]).reshape([8, KEY_SIZE])
    by_key = (row_0, row_1, row_2, row_3)
    return gl.convert_layout(read, READ), by_key, squares, gl.convert_layout(added, ADDED), decay


@gluon.jit
def _part(left, right):
    """Returns each lane's part of the sum of products."""
    return gl.sum((left * right).reshape([32, 4]), 1)


@gluon.jit
def _four(x):
    """Returns four arrays as one, with two axes of two after their own."""
    return gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3]))
