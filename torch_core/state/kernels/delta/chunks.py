"""The states of the gated delta rule, chunk after chunk, from the chunks' inverted systems (`systems.py`).

A program keeps rows of one head's state in registers, as the left operand and the sum of its products. Few long
sequences are cut into segments, because a state after a segment is a linear function of the state before it: one
launch finds these functions, a second one the state before each segment, and then all segments run at the same time.
Most heads forget within a segment: of chunks behind which less than exp(-104) of the state is left until its end,
nothing is found, also where the state is no finite number. (FlashQLA of the Qwen team does so where less than exp(-10)
is left, which the error rule would not allow.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.states import load_state, store_state, zero_padding
from torch_core.device.work import locate_tile

# Of this and smaller numbers exp is 0 in float32.
_LOG_ZERO = tl.constexpr(-104.0)


@triton.jit
def gated_delta_summaries_kernel(
    key,
    value,
    query_start_loc,
    inverses,
    factors,
    reads,
    adds,
    through,
    growths,
    summaries,
    kept,
    num_seqs,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (segments of the batch by a static bound, heads, tiles of BLOCK_V rows of a state and of its factor).

    Writes for each segment but the last one of a sequence the state after it if zeros were before it, and below it the
    transpose of the matrix that a state before it is multiplied with, in float32. Writes 1 as `kept` if that matrix is
    not 0, by `growths`; without these, all chunks are computed.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq, segment, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, SEGMENT * CHUNK, 1)
    if tile >= total:
        return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if length <= (segment + 1) * SEGMENT * CHUNK:
        return
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, CHUNK) + segment * SEGMENT
    line = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = channel < KEY_SIZE
    is_value = line < VALUE_SIZE
    begin = 0
    is_kept = True
    if growths is not None:
        index = tl.arange(0, SEGMENT)
        growth = tl.load(growths + (first + index) * NUM_HEADS + head)
        forgets = tl.cumsum(growth, 0, reverse=True) < _LOG_ZERO
        begin = tl.max(tl.where(forgets, index, 0), 0)
        is_kept = tl.max(forgets.to(tl.int32), 0) == 0
        # The rows of a matrix that is 0 need no chunk.
        begin = tl.where(is_kept | (tl.program_id(2) * BLOCK_V < VALUE_PADDED), begin, SEGMENT)
        if tl.program_id(2) == 0:
            tl.store(kept + tile * NUM_HEADS + head, is_kept.to(tl.int32))
    state = tl.where(((line - VALUE_PADDED)[:, None] == channel[None, :]) & is_kept, 1.0, 0.0)
    if through is None:
        last = state_factor(factors, ((first + begin) * NUM_HEADS + head).to(tl.int64), CHUNK)
    for index in range(begin, SEGMENT):
        chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
        place = start.to(tl.int64) + (segment * SEGMENT + index) * CHUNK + step
        values = value + place[:, None] * value_token_stride + head * value_head_stride + line[None, :]
        v = tl.load(values, mask=is_value[None, :], other=0.0)
        if through is None:
            keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
            k = tl.load(keys, mask=is_channel[None, :], other=0.0)
            _, state = corrected(state, k, v, inverses, factors, last, chunk, PRECISION, CHUNK)
            last = state_factor(factors, chunk + (index + 1 < SEGMENT) * NUM_HEADS, CHUNK)
        else:
            _, state = corrected_by_channel(
                state, v, inverses, reads, adds, through, chunk, channel, KEY_SIZE, PRECISION, CHUNK
            )
    height: tl.constexpr = VALUE_PADDED + KEY_PADDED
    target = summaries + (tile * NUM_HEADS + head).to(tl.int64) * height * KEY_PADDED
    if tl.program_id(2) * BLOCK_V < VALUE_PADDED:
        tl.store(target + line[:, None] * KEY_PADDED + channel[None, :], state)
    else:
        column = line - VALUE_PADDED
        turned = target + (VALUE_PADDED + channel[None, :]) * KEY_PADDED + column[:, None]
        tl.store(turned, state, mask=(column < KEY_PADDED)[:, None])


@triton.jit
def gated_delta_starts_kernel(
    query_start_loc,
    cache_indices,
    has_initial_state,
    states,
    summaries,
    kept,
    num_states,
    states_slot_stride,
    states_head_stride,
    states_row_stride,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (sequences, heads, tiles of BLOCK_R rows of a state). Replaces the summaries' states by those after them.

    The last segment of a sequence has no summary; the state before the first one is that of the sequence. Where all
    segments forget the state before them, the summaries are right as they are.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.arange(0, KEY_PADDED)
    length = tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)
    count = (length + SEGMENT * CHUNK - 1) // (SEGMENT * CHUNK) - 1
    if count <= 0:
        return
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, SEGMENT * CHUNK)
    if kept is not None:
        passed_on = 0
        for start in range(0, count, BLOCK_R):
            segment = start + tl.arange(0, BLOCK_R)
            held = kept + (first + segment) * NUM_HEADS + head
            passed_on += tl.sum(tl.load(held, mask=segment < count, other=0), 0)
        if passed_on == 0:
            return
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
    height: tl.constexpr = VALUE_PADDED + KEY_PADDED
    inner = VALUE_PADDED + tl.arange(0, KEY_PADDED)
    for index in range(count):
        base = summaries + ((first + index) * NUM_HEADS + head).to(tl.int64) * height * KEY_PADDED + channel[None, :]
        # Turned, as the matrix units read a right operand of 32 bits.
        factor = tl.trans(tl.load(base + inner[:, None] * KEY_PADDED))
        # Rows of no value are those of zeros.
        own = base + row[:, None] * KEY_PADDED
        state = tl.dot(state, factor, acc=tl.load(own), input_precision=PRECISION)
        tl.store(own, state)


@triton.jit
def gated_delta_chunks_kernel(
    query,
    key,
    value,
    query_start_loc,
    cache_indices,
    has_initial_state,
    inverses,
    products,
    factors,
    reads,
    queries,
    adds,
    through,
    summaries,
    states,
    out,
    num_tokens,
    num_seqs,
    num_states,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
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
    VALUE_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (segments, heads, tiles of BLOCK_V rows of a state). The first segment's programs zero padded tokens.

    Without segments `summaries` is absent, and there is one program for each sequence.
    """
    dtype: tl.constexpr = key.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row = row < VALUE_SIZE
    results = out + head * out_head_stride + row
    zero_padding(results, query_start_loc, num_tokens, num_seqs, out_token_stride, is_row, BLOCK_T)
    seq = tile
    segment = 0
    if summaries is not None:
        seq, segment, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, SEGMENT * CHUNK, 1)
        if tile >= total:
            return
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    if length <= 0:
        return

    channel = tl.arange(0, KEY_PADDED)
    step = tl.arange(0, CHUNK)
    is_channel = channel < KEY_SIZE
    count = (length + CHUNK - 1) // CHUNK
    first = chunks_before(query_start_loc, seq, BLOCK_SEQS, CHUNK)
    begin = 0
    end = count
    if summaries is not None:
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, count)
    state = load_state(
        states, cache_indices, has_initial_state, seq, head, row[:, None], channel[None, :], num_states,
        states_slot_stride, states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
    )  # fmt: skip
    if summaries is not None:  # noqa: SIM102, without summaries nothing is compiled
        if segment > 0:
            height: tl.constexpr = VALUE_PADDED + KEY_PADDED
            source = summaries + ((tile - 1) * NUM_HEADS + head).to(tl.int64) * height * KEY_PADDED
            state = tl.load(source + row[:, None] * KEY_PADDED + channel[None, :])
    if through is None:
        chunk = ((first + begin) * NUM_HEADS + head).to(tl.int64)
        read = tl.load(factors + chunk * 5 * CHUNK + CHUNK + step)
        last = state_factor(factors, chunk, CHUNK)
    for index in range(begin, end):
        chunk = ((first + index) * NUM_HEADS + head).to(tl.int64)
        live = index * CHUNK + step < length
        place = start.to(tl.int64) + index * CHUNK + step
        values = value + place[:, None] * value_token_stride + head * value_head_stride + row[None, :]
        v = tl.load(values, mask=live[:, None] & is_row[None, :], other=0.0)
        p = _load_lower(products + chunk * CHUNK * CHUNK, CHUNK)
        if through is None:
            is_key = live[:, None] & is_channel[None, :]
            keys = key + place[:, None] * key_token_stride + head // GROUP * key_head_stride + channel[None, :]
            source = query + place[:, None] * query_token_stride + head // GROUP * query_head_stride + channel[None, :]
            k = tl.load(keys, mask=is_key, other=0.0)
            q = tl.load(source, mask=is_key, other=0.0)
            found = tl.dot(state.to(dtype), tl.trans(q), input_precision=PRECISION) * read[None, :]
            u, state = corrected(state, k, v, inverses, factors, last, chunk, PRECISION, CHUNK)
            # The compiler loads the operands of products ahead, and not these factors of the results of products.
            chunk += (index + 1 < end) * NUM_HEADS
            read = tl.load(factors + chunk * 5 * CHUNK + CHUNK + step)
            last = state_factor(factors, chunk, CHUNK)
        else:
            rows = step[:, None] * KEY_SIZE + channel[None, :]
            q = tl.load(queries + chunk * CHUNK * KEY_SIZE + rows, mask=is_channel[None, :], other=0.0)
            found = tl.dot(state.to(dtype), tl.trans(q), input_precision=PRECISION)
            u, state = corrected_by_channel(
                state, v, inverses, reads, adds, through, chunk, channel, KEY_SIZE, PRECISION, CHUNK
            )
        found = tl.dot(u.to(dtype), tl.trans(p), acc=found, input_precision=PRECISION)
        places = results[:, None] + place[None, :] * out_token_stride
        tl.store(places, found.to(out.dtype.element_ty), mask=is_row[:, None] & live[None, :])
    if end == count:
        store_state(
            states, state, cache_indices, seq, head, row[:, None], channel[None, :], num_states, states_slot_stride,
            states_head_stride, states_row_stride, VALUE_SIZE, KEY_SIZE,
        )  # fmt: skip


@triton.jit
def corrected(state, k, v, inverses, factors, last, chunk, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the corrections of a chunk, [rows of the state, tokens], and the state after it.

    `last` is the chunk's `state_factor`.
    """
    step = tl.arange(0, CHUNK)
    held = factors + chunk * 5 * CHUNK
    inverse = _load_lower(inverses + chunk * CHUNK * CHUNK, CHUNK)
    into = tl.load(held + step)
    added = tl.load(held + 2 * CHUNK + step)
    known = tl.dot(state.to(k.dtype), tl.trans(k), input_precision=PRECISION) * into[None, :]
    u = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
    u = tl.dot(known.to(k.dtype), tl.trans(inverse), acc=u, input_precision=PRECISION)
    return u, tl.dot((u * added[None, :]).to(k.dtype), k, acc=state * last, input_precision=PRECISION)


@triton.jit
def corrected_by_channel(
    state, v, inverses, reads, adds, through, chunk, channel, KEY_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns what `corrected` does, with a gate for each channel."""
    step = tl.arange(0, CHUNK)
    is_channel = channel < KEY_SIZE
    rows = step[:, None] * KEY_SIZE + channel[None, :]
    k = tl.load(reads + chunk * CHUNK * KEY_SIZE + rows, mask=is_channel[None, :], other=0.0)
    added = tl.load(adds + chunk * CHUNK * KEY_SIZE + rows, mask=is_channel[None, :], other=0.0)
    inverse = _load_lower(inverses + chunk * CHUNK * CHUNK, CHUNK)
    last = tl.load(through + chunk * KEY_SIZE + channel, mask=is_channel, other=0.0)
    known = tl.dot(state.to(k.dtype), tl.trans(k), input_precision=PRECISION)
    u = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
    u = tl.dot(known.to(k.dtype), tl.trans(inverse), acc=u, input_precision=PRECISION)
    return u, tl.dot(u.to(k.dtype), added, acc=state * last[None, :], input_precision=PRECISION)


@triton.jit
def state_factor(factors, chunk, CHUNK: tl.constexpr):
    """Returns what a chunk of a head multiplies the state before it with."""
    return tl.load(factors + chunk * 5 * CHUNK + 3 * CHUNK)


@triton.jit
def _load_lower(square, CHUNK: tl.constexpr):
    """Returns a matrix of a chunk whose blocks of 16 above the diagonal are 0, and stored for the derivative alone."""
    step = tl.arange(0, CHUNK)
    is_lower = step[:, None] // 16 >= step[None, :] // 16
    return tl.load(square + step[:, None] * CHUNK + step[None, :], mask=is_lower, other=0.0)


@triton.jit
def chunks_before(query_start_loc, seq, BLOCK_SEQS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the number of chunks of the sequences before one."""
    first = 0
    for base in range(0, seq, BLOCK_SEQS):
        seqs = base + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(query_start_loc + seqs + 1, mask=seqs < seq, other=0)
        first += tl.sum((ends - tl.load(query_start_loc + seqs, mask=seqs < seq, other=0) + CHUNK - 1) // CHUNK, 0)
    return first
