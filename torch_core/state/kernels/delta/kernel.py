"""The kernel of the gated delta rule, token by token: a program keeps rows of one head's state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, natural_exp, store_state, zero_rows


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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Grid: tiles of BLOCK_V rows of the heads' states, those of a sequence side by side, as they lie in memory.

    The first sequence's programs zero padded tokens. With ONE_TOKEN no sequence has more than one.
    """
    COLUMNS: tl.constexpr = KEY_PADDED if KEY_PADDED < 32 else 32
    TILES: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES % NUM_HEADS
    seq = tl.program_id(0) // (TILES * NUM_HEADS)
    # Parts of a row along the first axis: a thread then holds columns of all parts, and adds them without a shuffle.
    channel = tl.arange(0, KEY_PADDED // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_channel = channel < KEY_SIZE
    is_row = row < VALUE_SIZE
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    kept = length
    if num_kept_tokens is not None:
        kept = tl.load(num_kept_tokens + seq)
    # No branch for an empty sequence, which has no slot: offsets and slots are then read together.
    num_states = tl.where(length > 0, num_states, 0)
    if ONE_TOKEN and states is not None:
        # As `load_state` and `store_state`, with addresses that are computed once; those of several tokens would take
        # registers until the last one.
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        is_held = (slot >= 0) & (slot < num_states)
        is_read = is_held
        if has_initial_state is not None:
            is_read &= tl.load(has_initial_state + seq) != 0
        inside = is_row[:, None, None] & is_channel[None, :, :]
        own = states + head * states_head_stride + row[:, None, None] * states_row_stride + channel[None, :, :]
        held = own + slot.to(tl.int64) * states_slot_stride
        state = tl.load(held, mask=inside & is_read, other=0.0).to(tl.float32)
    else:
        state = load_state(
            states, cache_indices, has_initial_state, seq, head, row[:, None, None], channel[None, :, :], num_states,
            states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
        )  # fmt: skip
    place = start.to(tl.int64)
    keys = key + place * key_token_stride + head // GROUP * key_head_stride + channel
    queries = query + place * query_token_stride + head // GROUP * query_head_stride + channel
    values = value + place * value_token_stride + head * value_head_stride + row
    rates = beta + place * beta_token_stride + head
    results = out + head * out_head_stride + row
    is_token = length > 0
    next_k = tl.load(keys, mask=is_channel & is_token, other=0.0)
    next_q = tl.load(queries, mask=is_channel & is_token, other=0.0)
    next_v = tl.load(values, mask=is_row & is_token, other=0.0)
    next_rate = tl.load(rates, mask=is_token, other=0.0)
    if g is not None:
        gates = g + place * g_token_stride + head
        next_gate = tl.load(gates, mask=is_token, other=0.0)
    if gk is not None:
        key_gates = gk + place * gk_token_stride + head * gk_head_stride + channel
        next_key_gate = tl.load(key_gates, mask=is_channel & is_token, other=0.0)
    for step in range(1 if ONE_TOKEN else length):
        k = next_k.to(tl.float32)
        q = next_q.to(tl.float32)
        v = next_v.to(tl.float32)
        rate = next_rate.to(tl.float32)
        if not ONE_TOKEN:
            # The next token is on its way while this one is computed.
            is_token = step + 1 < length
            keys += key_token_stride
            queries += query_token_stride
            values += value_token_stride
            rates += beta_token_stride
            next_k = tl.load(keys, mask=is_channel & is_token, other=0.0)
            next_q = tl.load(queries, mask=is_channel & is_token, other=0.0)
            next_v = tl.load(values, mask=is_row & is_token, other=0.0)
            next_rate = tl.load(rates, mask=is_token, other=0.0)
        if g is not None:
            state *= natural_exp(next_gate.to(tl.float32))
            if not ONE_TOKEN:
                gates += g_token_stride
                next_gate = tl.load(gates, mask=is_token, other=0.0)
        if gk is not None:
            state *= natural_exp(next_key_gate.to(tl.float32))[None, :, :]
            if not ONE_TOKEN:
                key_gates += gk_token_stride
                next_key_gate = tl.load(key_gates, mask=is_channel & is_token, other=0.0)
        k_norm = 1.0
        q_norm = scale
        if NORMALIZE:
            k_norm = 1 / tl.sqrt(_total(k * k) + epsilon)
            q_norm = scale / tl.sqrt(_total(q * q) + epsilon)
        # All sums over a row's channels are independent: the result is read from the state before its update.
        error = rate * (v - k_norm * _of_rows(state * k[None, :, :])) * k_norm
        found = q_norm * (_of_rows(state * q[None, :, :]) + error * _total(k * q))
        state += error[:, None, None] * k[None, :, :]
        is_written = is_row & (length > 0) if ONE_TOKEN else is_row
        tl.store(results + (place + step) * out_token_stride, found.to(out.dtype.element_ty), mask=is_written)
        if num_kept_tokens is not None and step + 1 == kept:
            store_state(
                states, state, cache_indices, seq, head, row[:, None, None], channel[None, :, :], num_states,
                states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
            )  # fmt: skip
    if num_kept_tokens is None:
        if ONE_TOKEN and states is not None:
            tl.store(held, state.to(states.dtype.element_ty), mask=inside & is_held)
        else:
            store_state(
                states, state, cache_indices, seq, head, row[:, None, None], channel[None, :, :], num_states,
                states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
            )  # fmt: skip
    # Last, because the first sequence's programs would wait for one more offset before their loads.
    if seq == 0:
        zero_rows(results, query_start_loc, num_tokens, num_seqs, out_token_stride, is_row, BLOCK_T)


@triton.jit
def _of_rows(products):
    """Returns the sums of each row: parts of a row first, columns second."""
    return tl.sum(tl.sum(products, 1), 1)


@triton.jit
def _total(products):
    return tl.sum(tl.sum(products, 0), 0)
