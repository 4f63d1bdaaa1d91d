"""The derivative of the gated delta rule: states forwards and their gradients backwards through the chunks.

With the names of the forward pass, for each chunk: R = V + into K S^T, U = T R, O = read Q S^T + P U and the next state
S' = last S + U^T added K, where T is the inverse with columns times beta. With gates of channels the factors are part
of K and Q. One launch keeps the state before each chunk and the gradient of the state after it, which need nothing of
each other; `gradients.py` has all else. The gradient of an inverse needs no inverse: that of the overlap of tokens t
and i is -dR[t] U[i].
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state
from torch_core.state.kernels.delta.chunks import chunks_before, corrected, corrected_by_channel, state_factor


@triton.jit
def gated_delta_both_states_kernel(
    query,
    key,
    value,
    d_out,
    d_last,
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    inverses,
    products,
    factors,
    reads,
    queries,
    adds,
    through,
    befores,
    d_afters,
    d_initial,
    num_states,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    d_out_token_stride,
    d_out_head_stride,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (sequences, heads, two for each tile of BLOCK_V rows of a state).

    The first half goes forwards through the chunks of a sequence and writes the state before each as `befores`. The
    second half goes back, and writes the gradient of the state after each as `d_afters`, and that of the first state as
    `d_initial`.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    TILES: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    count = (length + CHUNK - 1) // CHUNK
    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = (channel < KEY_SIZE)[None, :]
    is_row = row < VALUE_SIZE
    inside = is_row[:, None] & is_channel
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, CHUNK)
    square = row[:, None] * KEY_SIZE + channel[None, :]
    if tl.program_id(2) < TILES:
        num_states = tl.where(length > 0, num_states, 0)
        state = load_state(
            states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
            states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
        )  # fmt: skip
        for index in range(count):
            chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
            tl.store(befores + chunk * VALUE_SIZE * KEY_SIZE + square, state.to(dtype), mask=inside)
            live = (index * CHUNK + step < length)[:, None]
            place = start.to(tl.int64) + index * CHUNK + step
            values = value + place[:, None] * value_token_stride + head * value_head_stride + row[None, :]
            v = tl.load(values, mask=live & is_row[None, :], other=0.0)
            if through is None:
                keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
                k = tl.load(keys, mask=live & is_channel, other=0.0)
                last = state_factor(factors, chunk, CHUNK)
                _, state = corrected(state, k, v, inverses, factors, last, chunk, PRECISION, CHUNK)
            else:
                _, state = corrected_by_channel(
                    state, v, inverses, reads, adds, through, chunk, channel, KEY_SIZE, PRECISION, CHUNK
                )
    else:
        whole = (seq * NUM_HEADS + head).to(tl.int64) * VALUE_SIZE * KEY_SIZE
        d_state = tl.zeros([BLOCK_V, KEY_PADDED], tl.float32)
        if d_last is not None:
            d_state += tl.load(d_last + whole + square, mask=inside, other=0.0).to(tl.float32)
        for back in range(count):
            index = count - 1 - back
            chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
            tl.store(d_afters + chunk * VALUE_SIZE * KEY_SIZE + square, d_state.to(dtype), mask=inside)
            live = index * CHUNK + step < length
            place = start.to(tl.int64) + index * CHUNK + step
            results = d_out + place[:, None] * d_out_token_stride + head * d_out_head_stride + row[None, :]
            d_o = tl.trans(tl.load(results, mask=live[:, None] & is_row[None, :], other=0.0))
            block = chunk * CHUNK * CHUNK + step[:, None] * CHUNK + step[None, :]
            inverse = tl.load(inverses + block)
            p = tl.load(products + block)
            if through is None:
                is_key = live[:, None] & is_channel
                keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
                source = query + place[:, None] * query_token_stride + channel[None, :]
                k = tl.load(keys, mask=is_key, other=0.0)
                q = tl.load(source + head // GROUP * query_head_stride, mask=is_key, other=0.0)
                held = factors + chunk * 5 * CHUNK
                into = tl.load(held + step)
                read = tl.load(held + CHUNK + step)
                added = tl.load(held + 2 * CHUNK + step)
                last = tl.load(held + 3 * CHUNK)
                d_u = tl.dot(d_state.to(dtype), tl.trans(k), input_precision=PRECISION) * added[None, :]
                d_u = tl.dot(d_o, p, acc=d_u, input_precision=PRECISION)
                d_r = tl.dot(d_u.to(dtype), inverse, input_precision=PRECISION) * into[None, :]
                d_state = tl.dot(d_r.to(dtype), k, acc=d_state * last, input_precision=PRECISION)
                d_o = (d_o.to(tl.float32) * read[None, :]).to(dtype)
            else:
                rows = chunk * CHUNK * KEY_SIZE + step[:, None] * KEY_SIZE + channel[None, :]
                k = tl.load(reads + rows, mask=is_channel, other=0.0)
                q = tl.load(queries + rows, mask=is_channel, other=0.0)
                added_keys = tl.load(adds + rows, mask=is_channel, other=0.0)
                lasts = tl.load(through + chunk * KEY_SIZE + channel, mask=channel < KEY_SIZE, other=0.0)
                d_u = tl.dot(d_state.to(dtype), tl.trans(added_keys), input_precision=PRECISION)
                d_u = tl.dot(d_o, p, acc=d_u, input_precision=PRECISION)
                d_r = tl.dot(d_u.to(dtype), inverse, input_precision=PRECISION)
                d_state = tl.dot(d_r.to(dtype), k, acc=d_state * lasts[None, :], input_precision=PRECISION)
            d_state = tl.dot(d_o, q, acc=d_state, input_precision=PRECISION)
        if d_initial is not None:
            tl.store(d_initial + whole + square, d_state, mask=inside)
