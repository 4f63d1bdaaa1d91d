"""The gated delta rule of one decoded token of a sequence: what few sequences wait for is latency, not bandwidth."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.mask import LOG2E
from torch_core.state.kernels.delta.few import KEY_SIZE, rows_of

#: Rows of a state in a program, of which a thread has eight channels of two.
ROWS = gl.constexpr(4)
_STATE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 64], [2, 0]], [[0, 4], [0, 8], [0, 16], [0, 32], [1, 0]], [], [], [4, 128]
    )
)


@gluon.jit
def gated_delta_one_kernel(
    query,
    key,
    value,
    beta,
    g,
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
    BLOCK_V: gl.constexpr,
    TOKEN_STRIDES: gl.constexpr,
    HEAD_STRIDES: gl.constexpr,
    STATE_STRIDES: gl.constexpr,
):
    """Grid and parameters are those of `gated_delta_few_kernel`; no sequence has more than one token."""
    rows = rows_of(
        query_start_loc, cache_indices, has_initial_state, num_kept_tokens, states, num_states, NUM_HEADS, VALUE_SIZE,
        BLOCK_V, _STATE, STATE_STRIDES,
    )  # fmt: skip
    head = rows.head
    is_token = rows.length > 0
    channel = gl.arange(0, KEY_SIZE, gl.SliceLayout(0, _STATE))
    row = rows.first + gl.arange(0, BLOCK_V, gl.SliceLayout(1, _STATE))
    is_row = row < VALUE_SIZE
    place = rows.start.to(gl.int64)
    keys = key + head // GROUP * HEAD_STRIDES[1] + channel + place * TOKEN_STRIDES[1]
    queries = query + head // GROUP * HEAD_STRIDES[0] + channel + place * TOKEN_STRIDES[0]
    k = gl.load(keys, mask=is_token, other=0.0).to(gl.float32)
    q = gl.load(queries, mask=is_token, other=0.0).to(gl.float32)
    state = gl.load(rows.held, mask=rows.is_read, other=0.0).to(gl.float32)
    values = value + head * HEAD_STRIDES[2] + row + place * TOKEN_STRIDES[2]
    v = gl.load(values, mask=is_row & is_token, other=0.0).to(gl.float32)
    rate = gl.load(beta + head + place * TOKEN_STRIDES[3], mask=is_token, other=0.0).to(gl.float32)
    if g is not None:
        gate = gl.load(g + head + place * TOKEN_STRIDES[4], mask=is_token, other=0.0).to(gl.float32)
        state *= gl.exp2(gate * LOG2E)
    if gk is not None:
        gates = gk + head * HEAD_STRIDES[4] + channel + place * TOKEN_STRIDES[4]
        gate = gl.load(gates, mask=is_token, other=0.0).to(gl.float32)
        state *= gl.exp2(gate * LOG2E)[None, :]
    k_norm = 1.0
    q_norm = scale
    if NORMALIZE:
        k_norm = 1 / gl.sqrt(gl.sum(k * k, 0) + epsilon)
        q_norm = scale / gl.sqrt(gl.sum(q * q, 0) + epsilon)
    # All sums over a row's channels are independent: the result is read from the state before its update.
    error = rate * (v - k_norm * gl.sum(state * k[None, :], 1)) * k_norm
    found = q_norm * (gl.sum(state * q[None, :], 1) + error * gl.sum(k * q, 0))
    state += error[:, None] * k[None, :]
    gl.store(rows.held, state.to(states.dtype.element_ty), mask=rows.is_held & (rows.kept > 0))
    results = out + head * HEAD_STRIDES[5] + row
    gl.store(results + place * TOKEN_STRIDES[5], found.to(out.dtype.element_ty), mask=is_row & is_token)
    # Last, because the first sequence's programs would wait for one more offset before their loads.
    if rows.seq == 0:
        for token in range(gl.load(query_start_loc + num_seqs), num_tokens):
            gl.store(
                results + token.to(gl.int64) * TOKEN_STRIDES[5],
                gl.zeros_like(found).to(out.dtype.element_ty),
                mask=is_row,
            )
