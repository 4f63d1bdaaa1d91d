"""The kernel of the gated delta rule, token by token: a program keeps rows of one head's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl


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
    if seq == 0:
        for first in range(tl.load(query_start_loc + num_seqs), num_tokens, BLOCK_T):
            tokens = first + tl.arange(0, BLOCK_T)
            padded = results[None, :] + tokens.to(tl.int64)[:, None] * out_token_stride
            zeros = tl.zeros([BLOCK_T, BLOCK_V], out.dtype.element_ty)
            tl.store(padded, zeros, mask=(tokens < num_tokens)[:, None] & is_row[None, :])
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    if start >= end:
        return

    inside = is_row[:, None] & is_channel[None, :]
    state = tl.zeros([BLOCK_V, KEY_PADDED], tl.float32)
    if states is not None:
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        has_slot = (slot >= 0) & (slot < num_states)
        reads_state = has_slot
        if has_initial_state is not None:
            reads_state = reads_state & (tl.load(has_initial_state + seq) != 0)
        held = states + slot.to(tl.int64) * states_slot_stride + head * states_head_stride
        held = held + row[:, None] * states_row_stride + channel[None, :]
        state = tl.load(held, mask=inside & reads_state, other=0.0).to(tl.float32)
    for step in range(end - start):
        place = start.to(tl.int64) + step
        keys = key + place * key_token_stride + head // GROUP * key_head_stride + channel
        queries = query + place * query_token_stride + head // GROUP * query_head_stride + channel
        k = tl.load(keys, mask=is_channel, other=0.0).to(tl.float32)
        q = tl.load(queries, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(value + place * value_token_stride + head * value_head_stride + row, mask=is_row, other=0.0)
        if NORMALIZE:
            k = k / tl.sqrt(tl.sum(k * k, 0) + epsilon)
            q = q / tl.sqrt(tl.sum(q * q, 0) + epsilon)
        if g is not None:
            state *= tl.exp(tl.load(g + place * g_token_stride + head).to(tl.float32))
        if gk is not None:
            gates = gk + place * gk_token_stride + head * gk_head_stride + channel
            state *= tl.exp(tl.load(gates, mask=is_channel, other=0.0).to(tl.float32))[None, :]
        rate = tl.load(beta + place * beta_token_stride + head).to(tl.float32)
        error = rate * (v.to(tl.float32) - tl.sum(state * k[None, :], 1))
        state += error[:, None] * k[None, :]
        found = scale * tl.sum(state * q[None, :], 1)
        tl.store(results + place * out_token_stride, found.to(out.dtype.element_ty), mask=is_row)
    if states is not None:
        tl.store(held, state.to(states.dtype.element_ty), mask=inside & has_slot)
