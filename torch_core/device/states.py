"""Recurrent states, `(slots, heads, rows, channels)`, and the rows of padded tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import LOG2E


@triton.jit
def load_state(
    states, cache_indices, has_initial_state, seq, head, row, channel, num_states, slot_stride, head_stride, row_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns the elements (row, channel) of the state that a sequence starts from, in float32: zeros if it has none.

    `row` and `channel` lie along different axes, either one first.
    """
    inside = (row < ROWS) & (channel < CHANNELS)
    state = tl.zeros(inside.shape, tl.float32)
    if states is not None:
        # First: the compiler would compute the slot's address before it loads this, and wait once more.
        is_read = True if has_initial_state is None else tl.load(has_initial_state + seq) != 0
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        is_read = is_read & (slot >= 0) & (slot < num_states)
        held = states + slot.to(tl.int64) * slot_stride + head * head_stride + row * row_stride + channel
        state = tl.load(held, mask=inside & is_read, other=0.0).to(tl.float32)
    return state


@triton.jit
def store_state(
    states, state, cache_indices, seq, head, row, channel, num_states, slot_stride, head_stride, row_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores elements of a sequence's state in its slot, if it has one."""
    if states is not None:
        slot = seq if cache_indices is None else tl.load(cache_indices + seq)
        inside = (row < ROWS) & (channel < CHANNELS) & (slot >= 0) & (slot < num_states)
        held = states + slot.to(tl.int64) * slot_stride + head * head_stride + row * row_stride + channel
        tl.store(held, state.to(states.dtype.element_ty), mask=inside)


@triton.jit
def natural_exp(x):
    """Returns exp(x), and 0 instead of numbers below 2^-126: two instructions instead of `tl.exp`'s five."""
    return tl.math.exp2(x.to(tl.float32) * LOG2E)


@triton.jit
def chunk_rows(array, origin, step, column, stride):
    """Returns the places of a chunk's rows: a scalar address and offsets within the chunk take few registers."""
    return array + origin * stride + step[:, None] * stride + column[None, :]


@triton.jit
def chunk_columns(array, origin, step, row, stride):
    """Returns the places of a chunk's rows as columns; see `chunk_rows`."""
    return array + origin * stride + step[None, :] * stride + row[:, None]


@triton.jit
def zero_padding(results, query_start_loc, num_tokens, num_seqs, token_stride, is_row, BLOCK_T: tl.constexpr):
    """Zeroes the results after the last sequence, by the programs of the first one."""
    if tl.program_id(0) == 0:
        zero_rows(results, query_start_loc, num_tokens, num_seqs, token_stride, is_row, BLOCK_T)


@triton.jit
def zero_rows(results, query_start_loc, num_tokens, num_seqs, token_stride, is_row, BLOCK_T: tl.constexpr):
    """Zeroes the results after the last sequence."""
    for first in range(tl.load(query_start_loc + num_seqs), num_tokens, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        padded = results[None, :] + tokens.to(tl.int64)[:, None] * token_stride
        zeros = tl.zeros(padded.shape, results.dtype.element_ty)
        tl.store(padded, zeros, mask=(tokens < num_tokens)[:, None] & is_row[None, :])
