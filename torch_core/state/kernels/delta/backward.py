"""The derivative of the gated delta rule with a gate for each head, chunk by chunk.

With the names of the forward pass, for each chunk: R = V + into K S^T, U = T R, O = read Q S^T + P U and the next state
S' = last S + U^T added K, where T is the inverse with columns times beta. One launch keeps the state before each chunk,
one goes back from the last chunk and keeps the gradient of the state after each, and one computes all else. The
gradient of an inverse needs no inverse: that of the overlap of tokens t and i is -dR[t] U[i].
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, zero_padding
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.chunks import chunks_before, corrected
from torch_core.state.kernels.delta.systems import inverse_norms


@triton.jit
def gated_delta_kept_states_kernel(
    key,
    value,
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    inverses,
    factors,
    befores,
    num_states,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
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
    """Grid: (sequences, heads, tiles of BLOCK_V rows of a state). Writes the state before each chunk as `befores`."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if length <= 0:
        return
    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = (channel < KEY_SIZE)[None, :]
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, CHUNK)
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
    inside = (row < VALUE_SIZE)[:, None] & is_channel
    for index in range((length + CHUNK - 1) // CHUNK):
        chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
        target = befores + chunk * VALUE_SIZE * KEY_SIZE + row[:, None] * KEY_SIZE + channel[None, :]
        tl.store(target, state.to(befores.dtype.element_ty), mask=inside)
        live = (index * CHUNK + step < length)[:, None]
        place = start.to(tl.int64) + index * CHUNK + step
        keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
        values = value + place[:, None] * value_token_stride + head * value_head_stride + row[None, :]
        k = tl.load(keys, mask=live & is_channel, other=0.0)
        v = tl.load(values, mask=live & (row < VALUE_SIZE)[None, :], other=0.0)
        _, state = corrected(state, k, v, inverses, factors, chunk, PRECISION, CHUNK)


@triton.jit
def gated_delta_state_gradients_kernel(
    query,
    key,
    d_out,
    d_last,
    query_start_loc,
    inverses,
    products,
    factors,
    d_afters,
    d_initial,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    d_out_token_stride,
    d_out_head_stride,
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
    """Grid: (sequences, heads, tiles of BLOCK_V rows of a state). Goes back through the chunks of a sequence.

    Writes the gradient of the state after each chunk as `d_afters`, and that of the first state as `d_initial`.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    count = (length + CHUNK - 1) // CHUNK
    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = (channel < KEY_SIZE)[None, :]
    is_row = row < VALUE_SIZE
    inside = is_row[:, None] & is_channel
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, CHUNK)
    whole = (seq * NUM_HEADS + head).to(tl.int64) * VALUE_SIZE * KEY_SIZE
    square = row[:, None] * KEY_SIZE + channel[None, :]
    d_state = tl.zeros([BLOCK_V, KEY_PADDED], tl.float32)
    if d_last is not None:
        d_state += tl.load(d_last + whole + square, mask=inside, other=0.0).to(tl.float32)
    for back in range(count):
        index = count - 1 - back
        chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
        tl.store(d_afters + chunk * VALUE_SIZE * KEY_SIZE + square, d_state.to(dtype), mask=inside)
        live = index * CHUNK + step < length
        place = start.to(tl.int64) + index * CHUNK + step
        is_key = live[:, None] & is_channel
        keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
        queries = query + place[:, None] * query_token_stride + head // GROUP * query_head_stride + channel[None, :]
        results = d_out + place[:, None] * d_out_token_stride + head * d_out_head_stride + row[None, :]
        k = tl.load(keys, mask=is_key, other=0.0)
        q = tl.load(queries, mask=is_key, other=0.0)
        d_o = tl.trans(tl.load(results, mask=live[:, None] & is_row[None, :], other=0.0))
        block = chunk * CHUNK * CHUNK + step[:, None] * CHUNK + step[None, :]
        inverse = tl.load(inverses + block)
        p = tl.load(products + block)
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
        d_state = tl.dot(d_o, q, acc=d_state, input_precision=PRECISION)
    if d_initial is not None:
        tl.store(d_initial + whole + square, d_state, mask=inside)


@triton.jit
def gated_delta_gradients_kernel(
    query,
    key,
    value,
    beta,
    g,
    d_out,
    query_start_loc,
    inverses,
    products,
    factors,
    befores,
    d_afters,
    d_query,
    d_key,
    d_value,
    d_beta,
    d_g,
    num_tokens,
    num_seqs,
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
    d_out_token_stride,
    d_out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads of keys). Sums over the heads of a key in their order."""
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    key_head = tl.program_id(1)
    channel = tl.arange(0, KEY_PADDED)
    is_channel = (channel < KEY_SIZE)[None, :]
    key_stride: tl.constexpr = NUM_HEADS // GROUP * KEY_SIZE
    own = key_head * KEY_SIZE + channel
    zero_padding(d_query + own, query_start_loc, num_tokens, num_seqs, key_stride, channel < KEY_SIZE, BLOCK_T)
    zero_padding(d_key + own, query_start_loc, num_tokens, num_seqs, key_stride, channel < KEY_SIZE, BLOCK_T)
    value_stride: tl.constexpr = NUM_HEADS * VALUE_SIZE
    for member in range(GROUP):
        head = key_head * GROUP + member
        one = tl.arange(0, 1)
        zero_padding(d_beta + head + one, query_start_loc, num_tokens, num_seqs, NUM_HEADS, one == 0, BLOCK_T)
        if d_g is not None:
            zero_padding(d_g + head + one, query_start_loc, num_tokens, num_seqs, NUM_HEADS, one == 0, BLOCK_T)
        element = tl.arange(0, VALUE_PADDED)
        own_value = d_value + head * VALUE_SIZE + element
        is_value = element < VALUE_SIZE
        zero_padding(own_value, query_start_loc, num_tokens, num_seqs, value_stride, is_value, BLOCK_T)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return

    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    live = index * CHUNK + step < tl.load(query_start_loc + seq + 1) - start
    place = (start + index * CHUNK + step).to(tl.int64)
    row = step[:, None]
    column = step[None, :]
    is_key = live[:, None] & is_channel
    keys = key + place[:, None] * key_token_stride + key_head * key_head_stride + channel[None, :]
    queries = query + place[:, None] * query_token_stride + key_head * query_head_stride + channel[None, :]
    k = tl.load(keys, mask=is_key, other=0.0)
    q = tl.load(queries, mask=is_key, other=0.0)
    k_norm = inverse_norms(k, epsilon, NORMALIZE)
    q_norm = inverse_norms(q, epsilon, NORMALIZE)
    # The gradients of keys and queries whose norms are constant.
    d_k = tl.zeros([CHUNK, KEY_PADDED], tl.float32)
    d_q = tl.zeros([CHUNK, KEY_PADDED], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        chunk = (tile * NUM_HEADS + head).to(tl.int64)
        held = factors + chunk * 5 * CHUNK
        into = tl.load(held + step)
        read = tl.load(held + CHUNK + step)
        added = tl.load(held + 2 * CHUNK + step)
        last = tl.load(held + 3 * CHUNK)
        block = chunk * CHUNK * CHUNK + row * CHUNK + column
        inverse = tl.load(inverses + block)
        p = tl.load(products + block)
        gate = tl.zeros([CHUNK], tl.float32)
        if g is not None:
            gate = tl.load(g + place * g_token_stride + head, mask=live, other=0.0).to(tl.float32)
        decay = tl.cumsum(tl.maximum(gate, -100.0), 0)
        weights = tl.exp(tl.where(row >= column, decay[:, None] - decay[None, :], float("-inf"))) * k_norm[None, :]
        overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * weights * k_norm[:, None]
        overlap = tl.where(row > column, overlap, 0.0)
        d_p = tl.zeros([CHUNK, CHUNK], tl.float32)
        d_overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        d_rate = tl.zeros([CHUNK], tl.float32)
        # Of the decay from the chunk's start to each token.
        d_decay = tl.zeros([CHUNK], tl.float32)
        d_last = 0.0
        for first in range(0, VALUE_PADDED, BLOCK_V):
            element = first + tl.arange(0, BLOCK_V)
            is_value = live[:, None] & (element < VALUE_SIZE)[None, :]
            values = value + place[:, None] * value_token_stride + head * value_head_stride + element[None, :]
            results = d_out + place[:, None] * d_out_token_stride + head * d_out_head_stride + element[None, :]
            square = chunk * VALUE_SIZE * KEY_SIZE + element[:, None] * KEY_SIZE + channel[None, :]
            inside = (element < VALUE_SIZE)[:, None] & is_channel
            state = tl.load(befores + square, mask=inside, other=0.0)
            d_state = tl.load(d_afters + square, mask=inside, other=0.0)
            d_last += last * tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
            v = tl.load(values, mask=is_value, other=0.0)
            d_o = tl.load(results, mask=is_value, other=0.0)
            known = tl.dot(k, tl.trans(state), input_precision=PRECISION) * into[:, None]
            r = known + v.to(tl.float32)
            u = tl.dot(inverse, r.to(dtype), input_precision=PRECISION)
            by_state = tl.dot(k, tl.trans(d_state), input_precision=PRECISION) * added[:, None]
            by_added = tl.sum(by_state * u, 1)
            d_last += tl.sum(by_added, 0)
            d_u = tl.dot(tl.trans(p), d_o, acc=by_state, input_precision=PRECISION)
            d_r = tl.dot(tl.trans(inverse), d_u.to(dtype), input_precision=PRECISION)
            target = d_value + place[:, None] * value_stride + head * VALUE_SIZE + element[None, :]
            tl.store(target, d_r.to(d_value.dtype.element_ty), mask=is_value)
            found = tl.dot(q, tl.trans(state), input_precision=PRECISION) * read[:, None]
            d_decay += tl.sum(found * d_o.to(tl.float32) + known * d_r, 1) - by_added
            narrow = u.to(dtype)
            narrow_d_r = d_r.to(dtype)
            # The error that beta multiplies, and its gradient divided by beta.
            error = r - tl.dot(overlap.to(dtype), narrow, input_precision=PRECISION)
            d_error = d_u - tl.dot(tl.trans(overlap.to(dtype)), narrow_d_r, input_precision=PRECISION)
            d_rate += tl.sum(error * d_error, 1)
            d_p = tl.dot(d_o, tl.trans(narrow), acc=d_p, input_precision=PRECISION)
            d_overlap = tl.dot(narrow_d_r, tl.trans(narrow), acc=d_overlap, input_precision=PRECISION)
            d_o = (d_o.to(tl.float32) * read[:, None]).to(dtype)
            d_q = tl.dot(d_o, state, acc=d_q, input_precision=PRECISION)
            d_k = tl.dot((d_r * into[:, None]).to(dtype), state, acc=d_k, input_precision=PRECISION)
            d_k = tl.dot((u * added[:, None]).to(dtype), d_state, acc=d_k, input_precision=PRECISION)
        d_p = tl.where(row >= column, d_p, 0.0)
        d_overlap = tl.where(row > column, -d_overlap, 0.0)
        both = d_p * p.to(tl.float32) + d_overlap * overlap
        d_decay += tl.sum(both, 1) - tl.sum(both, 0)
        d_decay += tl.where(step == CHUNK - 1, d_last, 0.0)
        d_p = (d_p * weights * (scale * q_norm)[:, None]).to(dtype)
        d_overlap = (d_overlap * weights * k_norm[:, None]).to(dtype)
        d_q = tl.dot(d_p, k, acc=d_q, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(d_p), q, acc=d_k, input_precision=PRECISION)
        d_k = tl.dot(d_overlap, k, acc=d_k, input_precision=PRECISION)
        d_k = tl.dot(tl.trans(d_overlap), k, acc=d_k, input_precision=PRECISION)
        rows = place * NUM_HEADS + head
        tl.store(d_beta + rows, d_rate.to(d_beta.dtype.element_ty), mask=live)
        if d_g is not None:
            d_gate = tl.sum(d_decay, 0) - tl.cumsum(d_decay, 0) + d_decay
            tl.store(d_g + rows, tl.where(gate > -100.0, d_gate, 0.0).to(d_g.dtype.element_ty), mask=live)
    if NORMALIZE:
        wide_k = k.to(tl.float32)
        wide_q = q.to(tl.float32)
        d_k -= wide_k * (tl.sum(d_k * wide_k, 1) * k_norm * k_norm)[:, None]
        d_q -= wide_q * (tl.sum(d_q * wide_q, 1) * q_norm * q_norm)[:, None]
    rows = place[:, None] * key_stride + key_head * KEY_SIZE + channel[None, :]
    tl.store(d_query + rows, d_q.to(d_query.dtype.element_ty), mask=is_key)
    tl.store(d_key + rows, d_k.to(d_key.dtype.element_ty), mask=is_key)
