"""The kernel of the short causal convolution: outputs of a tile of tokens, and the new state of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.work import locate_tile


@triton.jit
def causal_conv_kernel(
    x,
    weight,
    bias,
    query_start_loc,
    cache_indices,
    has_initial_state,
    num_kept_tokens,
    conv_states,
    out,
    out_1,
    out_2,
    num_tokens,
    num_seqs,
    num_states,
    x_token_stride,
    weight_channel_stride,
    weight_tap_stride,
    state_slot_stride,
    state_token_stride,
    out_token_stride,
    CHANNELS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
):
    """Grid: (tiles of BLOCK_T tokens of one sequence by a static bound, tiles of BLOCK_C channels).

    A sequence's first tile alone reads its state, which needs BLOCK_T >= WIDTH - 1, and then replaces it: no other
    program waits for it. Programs beyond the true tiles zero the rows of padded tokens.
    """
    PAST: tl.constexpr = WIDTH - 1
    if FIRST_COLUMN > 0:
        x += FIRST_COLUMN
    tile = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channels < CHANNELS)[None, :]
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, BLOCK_T, 1)
    steps = tl.arange(0, BLOCK_T)
    if tile >= total:
        padded = tl.load(query_start_loc + num_seqs) + (tile - total) * BLOCK_T + steps
        zeros = tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty)
        _store(
            zeros, out, out_1, out_2, padded.to(tl.int64)[:, None], channels[None, :],
            (padded < num_tokens)[:, None] & inside, out_token_stride, CHANNELS, START_1, START_2,
        )  # fmt: skip
        return

    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    tokens = index * BLOCK_T + steps
    live = tokens < length
    is_first = index == 0
    if conv_states is not None:
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        has_slot = is_first & (slot >= 0) & (slot < num_states)
        reads_state = has_slot
        if has_initial_state is not None:
            reads_state = reads_state & (tl.load(has_initial_state + seq) != 0)
        state = conv_states + slot.to(tl.int64) * state_slot_stride + channels[None, :]

    sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if bias is not None:
        sums += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = tokens + (tap - PAST)
        rows = x + (start + source).to(tl.int64)[:, None] * x_token_stride + channels[None, :]
        values = tl.load(rows, mask=(live & (source >= 0))[:, None] & inside, other=0.0).to(tl.float32)
        if conv_states is not None and tap < PAST and reads_state:
            is_past = (live & (source < 0))[:, None]
            old = tl.load(state + (source + PAST)[:, None] * state_token_stride, mask=is_past & inside, other=0.0)
            values = tl.where(is_past, old.to(tl.float32), values)
        factors = weight + channels * weight_channel_stride + tap * weight_tap_stride
        sums += values * tl.load(factors, mask=channels < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if SILU:
        sums = sums * tl.sigmoid(sums)
    _store(
        sums, out, out_1, out_2, (start + tokens).to(tl.int64)[:, None], channels[None, :],
        live[:, None] & inside, out_token_stride, CHANNELS, START_1, START_2,
    )  # fmt: skip

    if conv_states is not None and has_slot:
        kept = length if num_kept_tokens is None else tl.load(num_kept_tokens + seq)
        sequence = x + start.to(tl.int64) * x_token_stride + channels[None, :]
        _replace_state(
            state, sequence, kept, inside, reads_state, state_token_stride, x_token_stride, PAST, BLOCK_STATE
        )


@triton.jit
def causal_conv_step_kernel(
    x,
    weight,
    bias,
    query_start_loc,
    cache_indices,
    has_initial_state,
    num_kept_tokens,
    conv_states,
    out,
    out_1,
    out_2,
    num_tokens,
    num_seqs,
    num_states,
    x_token_stride,
    weight_channel_stride,
    weight_tap_stride,
    state_slot_stride,
    state_token_stride,
    out_token_stride,
    CHANNELS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: (sequences, tiles of BLOCK_C channels). The same, token by token: nothing is searched for.

    The first sequence's programs zero the rows of padded tokens.
    """
    PAST: tl.constexpr = WIDTH - 1
    if FIRST_COLUMN > 0:
        x += FIRST_COLUMN
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < CHANNELS
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    kept = length if num_kept_tokens is None else tl.load(num_kept_tokens + seq)
    if conv_states is not None:
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        has_slot = (slot >= 0) & (slot < num_states) & (length > 0)
        reads_state = has_slot if has_initial_state is None else has_slot & (tl.load(has_initial_state + seq) != 0)
        state = conv_states + slot.to(tl.int64) * state_slot_stride + channel
    first = tl.zeros([BLOCK_C], tl.float32)
    if bias is not None:
        first += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    # All that a token needs is loaded before anything waits; the inputs before it, once.
    source = x + start.to(tl.int64) * x_token_stride + channel
    latest = tl.load(source, mask=inside & (length > 0), other=0.0)
    factors, past = (), ()
    for tap in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * weight_channel_stride + tap * weight_tap_stride, mask=inside, other=0.0)
        factors = factors + (factor.to(tl.float32),)  # noqa: RUF005
    for entry in tl.static_range(PAST):
        old = tl.zeros([BLOCK_C], tl.float32)
        if conv_states is not None:
            old += tl.load(state + entry * state_token_stride, mask=inside & reads_state, other=0.0).to(tl.float32)
        past = past + (old,)  # noqa: RUF005
    for index in range(length):
        inputs = past + (latest.to(tl.float32),)  # noqa: RUF005
        source += x_token_stride
        latest = tl.load(source, mask=inside & (index + 1 < length), other=0.0)
        sums = first
        for tap in tl.static_range(WIDTH):
            sums += inputs[tap] * factors[tap]
        if SILU:
            sums = sums * tl.sigmoid(sums)
        _store(
            sums, out, out_1, out_2, (start + index).to(tl.int64), channel, inside,
            out_token_stride, CHANNELS, START_1, START_2,
        )  # fmt: skip
        past = inputs[1:]
        if conv_states is not None:
            is_kept = inside & has_slot & (index + 1 == kept)
            for entry in tl.static_range(PAST):
                held = state + entry * state_token_stride
                tl.store(held, past[entry].to(conv_states.dtype.element_ty), mask=is_kept)
    if tl.program_id(0) == 0:
        zeros = tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty)
        for row in range(tl.load(query_start_loc + num_seqs), num_tokens, BLOCK_T):
            rows = row + tl.arange(0, BLOCK_T)
            _store(
                zeros, out, out_1, out_2, rows.to(tl.int64)[:, None], channel[None, :],
                (rows < num_tokens)[:, None] & inside[None, :], out_token_stride, CHANNELS, START_1, START_2,
            )  # fmt: skip


@triton.jit
def _store(
    values, out, out_1, out_2, tokens, channels, mask, out_token_stride, CHANNELS: tl.constexpr,
    START_1: tl.constexpr, START_2: tl.constexpr,
):  # fmt: skip
    """Stores results of tokens and channels where they are: in the first array, or in the one of their channels."""
    if out_1 is None:
        places = out + tokens * out_token_stride + channels
        tl.store(places, values.to(out.dtype.element_ty), mask=mask)
    else:
        results = values.to(out.dtype.element_ty)
        tl.store(out + tokens * START_1 + channels, results, mask=mask & (channels < START_1))
        second = (channels >= START_1) & (channels < START_2)
        tl.store(out_1 + tokens * (START_2 - START_1) + (channels - START_1), results, mask=mask & second)
        if out_2 is not None:
            third = mask & (channels >= START_2)
            tl.store(out_2 + tokens * (CHANNELS - START_2) + (channels - START_2), results, mask=third)


@triton.jit
def _replace_state(
    state, sequence, kept, inside, reads_state, state_token_stride, x_token_stride, PAST: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
):  # fmt: skip
    """Stores the PAST inputs of a sequence that end with its kept tokens, the first from its old state or zeros."""
    entries = tl.arange(0, BLOCK_STATE)
    tokens = kept - PAST + entries
    exists = (entries < PAST)[:, None] & inside & (kept > 0)
    is_past = (tokens < 0)[:, None]
    rows = sequence + tokens.to(tl.int64)[:, None] * x_token_stride
    latest = tl.load(rows, mask=exists & (tokens >= 0)[:, None], other=0.0).to(tl.float32)
    if reads_state:
        old = tl.load(state + (tokens + PAST)[:, None] * state_token_stride, mask=exists & is_past, other=0.0)
        latest = tl.where(is_past, old.to(tl.float32), latest)
    # An entry moves to another thread's place: all must be read before any is written.
    tl.debug_barrier()
    tl.store(state + entries[:, None] * state_token_stride, latest.to(state.dtype.element_ty), mask=exists)
