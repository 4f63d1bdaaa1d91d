"""The kernels of the gated delta rule, chunk by chunk, by its WY form (Yang et al. 2024, arXiv:2406.06484).

Token t of a chunk corrects the state by `u[t] k[t]^T`, and u solves a triangular system. The first kernel inverts the
systems of all chunks at the same time: `u = U - W S^T` for the state S before the chunk. The second one goes through
the chunks of a sequence, holding rows of one head's state in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, store_state, zero_padding
from torch_core.device.work import locate_tile
from torch_core.state.kernels.delta.kernel import normalized


@triton.jit
def gated_delta_systems_kernel(
    query,
    key,
    value,
    beta,
    g,
    query_start_loc,
    corrections,
    responses,
    products,
    decays,
    num_seqs,
    epsilon,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    beta_token_stride,
    g_token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (chunks of the batch by a static bound, heads).

    Writes for each chunk and head, in the keys' type: U as `corrections`, W as `responses`, the decayed products of
    queries and keys as `products`; and in float32 the logarithms of the decay from the chunk's start as `decays`.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, CHUNK, 1)
    if tile >= total:
        return
    dtype: tl.constexpr = key.dtype.element_ty
    start = tl.load(query_start_loc + seq)
    step = tl.arange(0, CHUNK)
    token = index * CHUNK + step
    live = token < tl.load(query_start_loc + seq + 1) - start
    place = (start + token).to(tl.int64)
    channel = tl.arange(0, KEY_PADDED)
    is_key = live[:, None] & (channel < KEY_SIZE)[None, :]
    keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
    k = normalized(tl.load(keys, mask=is_key, other=0.0), epsilon, NORMALIZE)
    rate = tl.load(beta + place * beta_token_stride + head, mask=live, other=0.0).to(tl.float32)
    decay = tl.zeros([CHUNK], tl.float32)
    if g is not None:
        decay = tl.cumsum(tl.load(g + place * g_token_stride + head, mask=live, other=0.0).to(tl.float32), 0)

    row = step[:, None]
    column = step[None, :]
    overlap = tl.dot(k.to(dtype), tl.trans(k.to(dtype))) * rate[:, None]
    inverse = _inverse(tl.where(row > column, overlap * _weights(decay, row, column), 0.0), CHUNK).to(dtype)
    number = (tile * NUM_HEADS + head).to(tl.int64) * CHUNK
    tl.store(decays + number + step, decay)
    # Read here, keys again: registers are scarce while the system is inverted.
    k = normalized(tl.load(keys, mask=is_key, other=0.0), epsilon, NORMALIZE)
    w = tl.dot(inverse, (k * (rate * tl.exp(decay))[:, None]).to(dtype))
    target = responses + (number + row) * KEY_SIZE + channel[None, :]
    tl.store(target, w.to(dtype), mask=(channel < KEY_SIZE)[None, :])
    element = tl.arange(0, VALUE_PADDED)
    is_element = (element < VALUE_SIZE)[None, :]
    values = value + place[:, None] * value_token_stride + head * value_head_stride + element[None, :]
    v = tl.load(values, mask=live[:, None] & is_element, other=0.0).to(tl.float32)
    u = tl.dot(inverse, (v * rate[:, None]).to(dtype))
    tl.store(corrections + (number + row) * VALUE_SIZE + element[None, :], u.to(dtype), mask=is_element)
    queries = query + place[:, None] * query_token_stride + head // GROUP * query_head_stride + channel[None, :]
    q = normalized(tl.load(queries, mask=is_key, other=0.0), epsilon, NORMALIZE).to(dtype)
    p = tl.dot(q, tl.trans(k.to(dtype))) * _weights(decay, row, column)
    tl.store(products + (number + row) * CHUNK + column, p.to(dtype))


@triton.jit
def _weights(decay, row, column):
    # Of later tokens the difference would be positive without a bound.
    return tl.exp(tl.where(row >= column, decay[:, None] - decay[None, :], float("-inf")))


@triton.jit
def _inverse(lower, SIZE: tl.constexpr):
    """Returns the inverse of I + lower, of which `lower` is strictly lower triangular.

    By finite series, twice: inside blocks of 8, and of blocks. One series over all rows would lose digits for equal
    keys: its terms grow as binomial coefficients, here up to 70.
    """
    step = tl.arange(0, SIZE)
    one = tl.where(step[:, None] == step[None, :], 1.0, 0.0)
    is_block = step[:, None] // 8 == step[None, :] // 8
    n = tl.where(is_block, -lower, 0.0)
    n2 = _product(n, n)
    x = one + n + n2 + _product(n, n2)
    x += _product(x, _product(n2, n2))
    m = -_product(x, tl.where(is_block, 0.0, lower))
    tl.static_assert(SIZE <= 64)
    m2 = _product(m, m)
    x += _product(_product(m2, m2), x)
    x += _product(m2, x)
    return x + _product(m, x)


@triton.jit
def _product(left, right):
    # Three products of matrix units, as exact as one of float32.
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def gated_delta_chunks_kernel(
    query,
    key,
    query_start_loc,
    cache_indices,
    has_initial_state,
    corrections,
    responses,
    products,
    decays,
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
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (sequences, heads, tiles of BLOCK_V rows of a state). The first sequence's programs zero padded tokens."""
    dtype: tl.constexpr = key.dtype.element_ty
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    results = out + head * out_head_stride + row
    zero_padding(results, query_start_loc, num_tokens, num_seqs, out_token_stride, row < VALUE_SIZE, BLOCK_T)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if length <= 0:
        return

    first = 0
    for base in range(0, seq, BLOCK_SEQS):
        seqs = base + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(query_start_loc + seqs + 1, mask=seqs < seq, other=0)
        first += tl.sum((ends - tl.load(query_start_loc + seqs, mask=seqs < seq, other=0) + CHUNK - 1) // CHUNK, 0)
    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = channel < KEY_SIZE
    is_row = row < VALUE_SIZE
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
    for index in range((length + CHUNK - 1) // CHUNK):
        number = ((first + index) * NUM_HEADS + head).to(tl.int64) * CHUNK
        live = index * CHUNK + step < length
        place = start.to(tl.int64) + index * CHUNK + step
        is_key = live[:, None] & is_channel[None, :]
        keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
        queries = query + place[:, None] * query_token_stride + head // GROUP * query_head_stride + channel[None, :]
        k = normalized(tl.load(keys, mask=is_key, other=0.0), epsilon, NORMALIZE)
        q = normalized(tl.load(queries, mask=is_key, other=0.0), epsilon, NORMALIZE)
        decay = tl.load(decays + number + step)
        last = tl.load(decays + number + CHUNK - 1)
        source = responses + (number + step)[:, None] * KEY_SIZE + channel[None, :]
        w = tl.load(source, mask=is_channel[None, :], other=0.0)
        source = corrections + (number + step)[:, None] * VALUE_SIZE + row[None, :]
        u = tl.load(source, mask=is_row[None, :], other=0.0).to(tl.float32)
        p = tl.load(products + (number + step)[:, None] * CHUNK + step[None, :])

        held = tl.trans(state.to(dtype))
        u -= tl.dot(w, held)
        found = tl.dot((q * tl.exp(decay)[:, None]).to(dtype), held)
        found += tl.dot(p, u.to(dtype))
        places = results[None, :] + place[:, None] * out_token_stride
        tl.store(places, (found * scale).to(out.dtype.element_ty), mask=live[:, None] & is_row[None, :])
        k = (k * tl.exp(last - decay)[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(u.to(dtype)), k)
    store_state(
        states, state, cache_indices, seq, head, row[:, None], channel[None, :], num_states, states_slot_stride,
        states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
