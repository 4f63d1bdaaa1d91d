"""The kernel of the gated delta rule, token by token: a program keeps rows of one head's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, store_state, zero_padding


@triton.jit
def gated_delta_kernel(
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
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    beta_token_stride,
    g_token_stride,
    gk_token_stride,
    gk_head_stride,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid: (sequences, heads, tiles of BLOCK_V rows of a state). The first sequence's programs zero padded tokens."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.arange(0, KEY_PADDED)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_channel = channel < KEY_SIZE
    is_row = row < VALUE_SIZE
    results = out + head * out_head_stride + row
    zero_padding(results, query_start_loc, num_tokens, num_seqs, out_token_stride, is_row, BLOCK_T)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    # No branch for an empty sequence, which has no slot: offsets and slots are then read together.
    num_states = tl.where(length > 0, num_states, 0)
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
    for step in range(length):
        place = start.to(tl.int64) + step
        keys = key + place * key_token_stride + head // GROUP * key_head_stride + channel
        queries = query + place * query_token_stride + head // GROUP * query_head_stride + channel
        k = tl.load(keys, mask=is_channel, other=0.0).to(tl.float32)
        q = tl.load(queries, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(value + place * value_token_stride + head * value_head_stride + row, mask=is_row, other=0.0)
        rate = tl.load(beta + place * beta_token_stride + head).to(tl.float32)
        if g is not None:
            state *= tl.exp(tl.load(g + place * g_token_stride + head).to(tl.float32))
        if gk is not None:
            gates = gk + place * gk_token_stride + head * gk_head_stride + channel
            state *= tl.exp(tl.load(gates, mask=is_channel, other=0.0).to(tl.float32))[None, :]
        if NORMALIZE:
            k = k / tl.sqrt(tl.sum(k * k, 0) + epsilon)
            q = q / tl.sqrt(tl.sum(q * q, 0) + epsilon)
        # All sums over a row's channels are independent: the result is read from the state before its update.
        error = rate * (v.to(tl.float32) - tl.sum(state * k[None, :], 1))
        found = scale * (tl.sum(state * q[None, :], 1) + error * tl.sum(k * q, 0))
        state += error[:, None] * k[None, :]
        tl.store(results + place * out_token_stride, found.to(out.dtype.element_ty), mask=is_row)
        if num_kept_tokens is not None and step + 1 == tl.load(num_kept_tokens + seq):
            store_state(
                states, state, cache_indices, seq, head, row[:, None], channel[None, :], num_states,
                states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
            )  # fmt: skip
    if num_kept_tokens is None:
        store_state(
            states, state, cache_indices, seq, head, row[:, None], channel[None, :], num_states, states_slot_stride,
            states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
        )  # fmt: skip
