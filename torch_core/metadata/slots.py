"""From block tables to slots: where in the cache each new token is written."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.specs import PAD_SLOT_ID

__all__ = [
    "compute_positions",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "multiples",
    "write_slots",
    "write_uniform_slots",
]


def compute_positions(query_start_loc: np.ndarray, num_computed_tokens: np.ndarray) -> np.ndarray:
    """Returns int32[T]: the position in its sequence of each new token.

    Args:
        query_start_loc: int32[S + 1], running sum of the query lengths.
        num_computed_tokens: int32[S], tokens before the step.

    Example:
        >>> compute_positions(np.array([0, 2, 3], np.int32), np.array([5, 9], np.int32)).tolist()
        [5, 6, 9]
    """
    shift = num_computed_tokens - query_start_loc[:-1]
    positions = np.arange(query_start_loc[-1], dtype=np.int32)
    positions += np.repeat(shift, np.diff(query_start_loc)).astype(np.int32, copy=False)
    return positions


def compute_slot_mapping(
    block_tables: np.ndarray,
    query_start_loc: np.ndarray,
    num_computed_tokens: np.ndarray,
    *,
    block_size: int,
    num_tokens: int | None = None,
    start_idx: np.ndarray | None = None,
) -> np.ndarray:
    """Returns int32[num_tokens]: the slot of each new token, `block * block_size + offset`.

    The vectorised form of vLLM's `compute_slot_mapping` (`vllm/attention/backends/utils.py`). The inputs are trusted:
    every position must lie within its table's columns.

    Args:
        block_tables: int32[S, max_blocks].
        query_start_loc: int32[S + 1].
        num_computed_tokens: int32[S].
        block_size: tokens of one block.
        num_tokens: padded length of the result; None for no padding.
        start_idx: int32[S]; tokens at positions before it get no slot (they left the sliding window before the step
            ended); None to write all.

    Raises:
        InvalidInput: `num_tokens` is less than the number of new tokens.

    Example:
        >>> tables = np.array([[3, 7]], np.int32)
        >>> starts, computed = np.array([0, 3], np.int32), np.array([3], np.int32)
        >>> compute_slot_mapping(tables, starts, computed, block_size=4, num_tokens=4).tolist()
        [15, 28, 29, -1]
    """
    num_new = int(query_start_loc[-1])
    padded = num_new if num_tokens is None else num_tokens
    if padded < num_new:
        raise InvalidInput(f"num_tokens is {padded}; the step has {num_new} new tokens. Pad to at least that many.")
    slots = np.empty(padded, np.int32)
    write_slots(slots, query_start_loc, num_computed_tokens, block_tables, block_size=block_size, start_idx=start_idx)
    return slots


def compute_slot_mapping_start_idx(
    query_lens: np.ndarray, num_computed_tokens: np.ndarray, sliding_window: int | None
) -> np.ndarray:
    """Returns int32[S]: the first position of each sequence that is worth writing under a sliding window.

    With a window of `sliding_window` tokens (the own one included) the next step's query sees the last
    `sliding_window - 1` of the present tokens and every later step fewer, so earlier ones of a prompt are needed only
    within the step itself. vLLM's helper of this name keeps one token more and covers prompts without a prefix only;
    this one keeps to that number and covers any prefix.

    Args:
        query_lens: int32[S], new tokens.
        num_computed_tokens: int32[S], tokens before the step.
        sliding_window: window in tokens, or None for all zeros.

    Raises:
        InvalidInput: the window is not positive.

    Example:
        >>> compute_slot_mapping_start_idx(np.array([10, 2]), np.array([0, 9]), 4).tolist()
        [6, 7]
    """
    seq_lens = (query_lens + num_computed_tokens).astype(np.int32)
    if sliding_window is None:
        return np.zeros_like(seq_lens)
    if sliding_window < 1:
        raise InvalidInput(f"sliding_window is {sliding_window}; it must be at least 1, or None for off.")
    return np.maximum(seq_lens - sliding_window, 0, dtype=np.int32)


def write_slots(
    out: np.ndarray,
    query_start_loc: np.ndarray,
    num_computed_tokens: np.ndarray,
    block_tables: np.ndarray,
    *,
    block_size: int,
    start_idx: np.ndarray | None = None,
) -> np.ndarray:
    """Writes what `compute_slot_mapping` returns to `out` and returns the positions of the new tokens, int32[T]."""
    positions = compute_positions(query_start_loc, num_computed_tokens)
    sequence = np.repeat(np.arange(query_start_loc.shape[0] - 1), np.diff(query_start_loc))
    column, offset = np.divmod(positions, np.int32(block_size))
    slots = block_tables[sequence, column]
    slots *= block_size
    slots += offset
    if start_idx is not None:
        slots[positions < start_idx[sequence]] = PAD_SLOT_ID
    out[: positions.shape[0]] = slots
    out[positions.shape[0] :] = PAD_SLOT_ID
    return positions


def write_uniform_slots(
    out: np.ndarray,
    positions: np.ndarray,
    computed: np.ndarray,
    num_new_tokens: int,
    block_tables: np.ndarray,
    *,
    block_size: int,
) -> None:
    """Writes positions and slots of rows with equally many new tokens, and padding behind; the short way to decode.

    Args:
        out: int32[T], the slot mapping to write.
        positions: int32[T], to write.
        computed: int32[S], tokens of each row before the step.
        num_new_tokens: of every row, at least 1.
        block_tables: int32[at least S, max_blocks], contiguous.
        block_size: tokens of one block.
    """
    num_rows, width = computed.shape[0], block_tables.shape[1]
    if num_rows == num_new_tokens == 1:
        # One token of one row, as most steps of a lone user are: arrays cost more than the arithmetic.
        position = int(computed[0])
        column, offset = divmod(position, block_size)
        positions[0], out[0] = position, int(block_tables[0, column]) * block_size + offset
        positions[1:], out[1:] = 0, PAD_SLOT_ID
        return
    first_entry, where = multiples(width, num_rows), computed
    if num_new_tokens > 1:
        where = (computed[:, None] + np.arange(num_new_tokens, dtype=np.int32)).reshape(-1)
        first_entry = first_entry.repeat(num_new_tokens)
    column = where // block_size
    slots = block_tables.reshape(-1)[first_entry + column]
    # block * size + (position - column * size)
    slots -= column
    slots *= block_size
    num_new = where.shape[0]
    np.add(slots, where, out=out[:num_new])
    positions[:num_new] = where
    if num_new < out.shape[0]:
        positions[num_new:] = 0
        out[num_new:] = PAD_SLOT_ID


@lru_cache(maxsize=64)
def multiples(step: int, count: int) -> np.ndarray:
    """Returns int64[count], read-only: 0, step, 2 * step and so on; the same array for the same sizes."""
    values = np.arange(count) * step
    values.setflags(write=False)
    return values
