"""The gated delta rule of a few decoded tokens of a sequence, by products with the state before them.

A program is a warp, which has rows of one head's state in registers from the first token to the last. Tensor cores
multiply them with the keys and queries of all tokens at once, and add all corrections at the end; what a token
corrects, the later ones learn from the products of keys. Numbers of 32 bits are read by their 11 leading bits, so a
state is the sum of two parts. Each layout holds what a thread has loaded where a product looks for it: which channel
has which place in a product does not matter to a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torch_core.device.mask import LOG2E

#: Channels of keys that the layouts are made for.
KEY_SIZE = gl.constexpr(128)
#: The most tokens of a sequence without gates of channels: columns of a product.
TOKENS = gl.constexpr(8)

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT.value, 1))
_NARROW_LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
_NARROW_RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT.value, 2))
IN_ROWS = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
IN_COLUMNS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
_CHANNEL_BITS = gl.constexpr([[0, 1], [0, 2], [0, 16], [0, 32], [0, 64]])
_LANES = gl.constexpr([[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]])
STATE = gl.constexpr(gl.DistributedLinearLayout([*_CHANNEL_BITS.value, [8, 0]], _LANES.value, [], [], [16, 128]))
LONG_STATE = gl.constexpr(
    gl.DistributedLinearLayout([*_CHANNEL_BITS.value, [8, 0], [16, 0]], _LANES.value, [], [], [32, 128])
)
# Keys and queries as products with states need them, and keys as sums over tokens do.
READ = gl.constexpr(gl.DistributedLinearLayout(_CHANNEL_BITS.value, _LANES.value, [], [], [8, 128]))
ADDED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 16], [0, 32], [0, 64]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [], [], [8, 128]
    )
)


class _Rows(NamedTuple):
    """Rows of a state of a sequence.

    Attributes:
        seq: the sequence.
        head: the head.
        first: the first row.
        start: the sequence's first token.
        length: its tokens.
        kept: tokens after which the state is stored.
        held: places of the rows.
        is_read: whether they are read.
        is_held: whether they are stored.
    """

    seq: Any
    head: Any
    first: Any
    start: Any
    length: Any
    kept: Any
    held: Any
    is_read: Any
    is_held: Any


@gluon.jit
def gated_delta_few_kernel(
    query,
    key,
    value,
    beta,
    g,
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
    """Grid: tiles of BLOCK_V rows of the heads' states, those of a sequence side by side, as they lie in memory.

    No sequence has more than STEPS tokens. The first sequence's programs zero padded tokens. TOKEN_STRIDES and
    HEAD_STRIDES are those of queries, keys, values, betas, gates and results, STATE_STRIDES from a slot, a head and a
    row to the next.
    """
    rows = rows_of(
        query_start_loc, cache_indices, has_initial_state, num_kept_tokens, states, num_states, NUM_HEADS, VALUE_SIZE,
        BLOCK_V, STATE, STATE_STRIDES,
    )  # fmt: skip
    length = rows.length
    head = rows.head
    place = rows.start.to(gl.int64)
    token = gl.arange(0, TOKENS, IN_COLUMNS)
    is_token = token < length
    row = (rows.first + gl.arange(0, BLOCK_V, IN_ROWS))[:, None]
    is_row = row < VALUE_SIZE
    values = value + head * HEAD_STRIDES[2] + row + (place + token)[None, :] * TOKEN_STRIDES[2]
    rates = beta + head + (place + token) * TOKEN_STRIDES[3]
    v = gl.load(values, mask=is_row & is_token[None, :], other=0.0)
    rate = gl.load(rates, mask=is_token, other=0.0)
    factors = rate
    if g is not None:
        factors = gl.load(g + head + (place + token) * TOKEN_STRIDES[4], mask=is_token, other=0.0)
        factors = gl.exp2(factors.to(gl.float32) * LOG2E)
    state = gl.load(rows.held, mask=rows.is_read, other=0.0).to(gl.float32)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, READ))[:, None]
    channel = gl.arange(0, KEY_SIZE, gl.SliceLayout(0, READ))[None, :]
    keys = key + head // GROUP * HEAD_STRIDES[1] + place * TOKEN_STRIDES[1]
    queries = query + head // GROUP * HEAD_STRIDES[0] + place * TOKEN_STRIDES[0]
    k = gl.load(keys + line * TOKEN_STRIDES[1] + channel, mask=line < length, other=0.0)
    q = gl.load(queries + line * TOKEN_STRIDES[0] + channel, mask=line < length, other=0.0)

    left = gl.convert_layout(_twice(_in_pairs(k)), _NARROW_LEFT)
    zeros = gl.zeros([16, TOKENS], gl.float32, PRODUCT)
    by_key = mma_v2(left, gl.convert_layout(_in_pairs(k).permute([1, 0]), _NARROW_RIGHT), zeros)
    by_query = mma_v2(left, gl.convert_layout(_in_pairs(q).permute([1, 0]), _NARROW_RIGHT), zeros)
    k = k.to(gl.float32)
    q = q.to(gl.float32)
    k_norm = gl.full([TOKENS], 1.0, gl.float32, IN_COLUMNS)
    q_norm = k_norm * scale
    if NORMALIZE:
        k_norm = 1 / gl.sqrt(gl.convert_layout(gl.sum(k * k, 1), IN_COLUMNS) + epsilon)
        q_norm = scale / gl.sqrt(gl.convert_layout(gl.sum(q * q, 1), IN_COLUMNS) + epsilon)
    rate = rate.to(gl.float32) * k_norm
    v = v.to(gl.float32) * rate[None, :]
    rate = (rate * k_norm)[None, :]
    high, low = parts_of(state)
    # What each key and query reads of the state before the first token, then of that after each one.
    known = gl.zeros([BLOCK_V, TOKENS], gl.float32, PRODUCT)
    right = gl.convert_layout(in_fours(k).permute([1, 0]), RIGHT)
    known = mma_v2(high, right, known, "tf32") + mma_v2(low, right, gl.zeros_like(known), "tf32")
    right = gl.convert_layout(in_fours(q).permute([1, 0]), RIGHT)
    found = gl.zeros([BLOCK_V, TOKENS], gl.float32, PRODUCT)
    found = mma_v2(high, right, found, "tf32") + mma_v2(low, right, gl.zeros_like(found), "tf32")
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, ADDED))[:, None]
    channel = gl.arange(0, KEY_SIZE, gl.SliceLayout(0, ADDED))[None, :]
    # Zero times NaN is NaN: the state does not read keys of tokens that are not kept.
    added = gl.load(keys + line * TOKEN_STRIDES[1] + channel, mask=line < gl.minimum(rows.kept, length), other=0.0)

    order = gl.arange(0, 16, IN_ROWS)[:, None]
    errors = gl.zeros([BLOCK_V, TOKENS], gl.float32, PRODUCT)
    results = errors
    decay = 1.0
    for step in gl.static_range(STEPS):
        if g is not None:
            factor = gl.sum(gl.where(token == step, factors, 0.0), 0)
            known *= factor
            found *= factor
            factor = gl.where(step < rows.kept, factor, 1.0)
            errors *= factor
            decay *= factor
        is_step = (token == step)[None, :]
        error = gl.sum(gl.where(is_step, v - rate * known, 0.0), 1)[:, None]
        known += error * gl.sum(gl.where(order == step, by_key, 0.0), 0)[None, :]
        found += error * gl.sum(gl.where(order == step, by_query, 0.0), 0)[None, :]
        results = gl.where(is_step, found, results)
        errors = gl.where(is_step & (step < rows.kept), error, errors)
    places = out + head * HEAD_STRIDES[5] + row + (place + token)[None, :] * TOKEN_STRIDES[5]
    gl.store(places, (results * q_norm[None, :]).to(out.dtype.element_ty), mask=is_row & is_token[None, :])
    if rows.kept > 0:
        state = state_after(state, decay, errors, added.to(gl.float32), STATE)
        gl.store(rows.held, state.to(states.dtype.element_ty), mask=rows.is_held)
    zero_padding(out + head * HEAD_STRIDES[5] + row, is_row, rows, query_start_loc, num_tokens, num_seqs, TOKEN_STRIDES)


@gluon.jit
def rows_of(
    query_start_loc, cache_indices, has_initial_state, num_kept_tokens, states, num_states, NUM_HEADS: gl.constexpr,
    VALUE_SIZE: gl.constexpr, BLOCK_V: gl.constexpr, LAYOUT: gl.constexpr, STRIDES: gl.constexpr,
):  # fmt: skip
    """Returns the rows of a program."""
    TILES: gl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    first = gl.program_id(0) % TILES * BLOCK_V
    head = gl.program_id(0) // TILES % NUM_HEADS
    seq = gl.program_id(0) // (TILES * NUM_HEADS)
    start = gl.load(query_start_loc + seq)
    length = gl.load(query_start_loc + seq + 1) - start
    kept = length
    if num_kept_tokens is not None:
        kept = gl.load(num_kept_tokens + seq)
    slot = seq if cache_indices is None else gl.load(cache_indices + seq)
    is_held = (slot >= 0) & (slot < num_states) & (length > 0)
    is_read = is_held
    if has_initial_state is not None:
        is_read &= gl.load(has_initial_state + seq) != 0
    channel = gl.arange(0, KEY_SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    row = (first + gl.arange(0, BLOCK_V, gl.SliceLayout(1, LAYOUT)))[:, None]
    held = states + head.to(gl.int64) * STRIDES[1] + row * STRIDES[2] + channel + slot.to(gl.int64) * STRIDES[0]
    return _Rows(
        seq, head, first, start, length, kept, held, is_read & (row < VALUE_SIZE), is_held & (row < VALUE_SIZE)
    )


@gluon.jit
def zero_padding(results, is_row, rows, query_start_loc, num_tokens, num_seqs, STRIDES: gl.constexpr):
    """Zeroes padded tokens, by the first sequence's programs.

    Last, because they would wait for one more offset before their loads.
    """
    if rows.seq == 0:
        column = gl.arange(0, TOKENS, IN_COLUMNS)[None, :]
        for origin in range(gl.load(query_start_loc + num_seqs), num_tokens, TOKENS):
            token = (origin + column).to(gl.int64)
            zeros = gl.zeros([results.shape[0], TOKENS], results.dtype.element_ty, PRODUCT)
            gl.store(results + token * STRIDES[5], zeros, mask=is_row & (token < num_tokens))


@gluon.jit
def state_after(state, decay, errors, added, LAYOUT: gl.constexpr):
    """Returns a state times `decay` and sums over tokens of errors times keys, of eight columns."""
    # A product has columns 0, 2, 4, 6, 1, 3, 5, 7, of the high parts, then of the low ones.
    ROWS: gl.constexpr = state.shape[0]
    errors = errors.reshape([ROWS, 4, 2]).permute([0, 2, 1]).reshape([ROWS, 8])
    high = high_part(errors)
    errors = gl.join(high, errors - high).permute([0, 2, 1]).reshape([ROWS, 16])
    added = added.reshape([4, 2, KEY_SIZE]).permute([1, 0, 2]).reshape([8, 8, 8, 2])
    added = _twice(added.permute([0, 1, 3, 2]).reshape([8, KEY_SIZE]))
    state = (state * decay).reshape([ROWS, 8, 4, 2, 2]).permute([0, 1, 4, 2, 3]).reshape([ROWS, KEY_SIZE])
    state = gl.convert_layout(state, PRODUCT)
    state = mma_v2(gl.convert_layout(errors, LEFT), gl.convert_layout(added, RIGHT), state, "tf32")
    state = state.reshape([ROWS, 8, 2, 4, 2]).permute([0, 1, 3, 4, 2]).reshape([ROWS, KEY_SIZE])
    return gl.convert_layout(state, LAYOUT)


@gluon.jit
def parts_of(state):
    """Returns the high and low parts of a state as operands."""
    high = high_part(state)
    return gl.convert_layout(in_fours(high), LEFT), gl.convert_layout(in_fours(state - high), LEFT)


@gluon.jit
def high_part(x):
    """Returns numbers of the 11 leading bits."""
    return (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def in_fours(x):
    """Returns channels in the order of an operand's places: a thread has loaded four neighbours."""
    return x.reshape([x.shape[0], 8, 4, 4]).permute([0, 1, 3, 2]).reshape([x.shape[0], KEY_SIZE])


@gluon.jit
def _in_pairs(x):
    """The same for operands of 16 bits."""
    return x.reshape([8, 8, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([8, KEY_SIZE])


@gluon.jit
def _twice(x):
    """Returns eight rows and the same below."""
    return gl.join(x, x).permute([2, 0, 1]).reshape([16, KEY_SIZE])
