"""From block tables to slots: where in the cache each new token is written."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from torch_core.base.specs import PAD_SLOT_ID


def compute_positions(query_start_loc: np.ndarray, num_computed_tokens: np.ndarray) -> np.ndarray:
    """Returns int32[T], the position of each new token, of int32[S + 1] and the tokens before the step, int32[S]."""
    shift = num_computed_tokens - query_start_loc[:-1]
    positions = np.arange(query_start_loc[-1], dtype=np.int32)
    positions += np.repeat(shift, np.diff(query_start_loc)).astype(np.int32, copy=False)
    return positions


def write_slots(
    out: np.ndarray,
    query_start_loc: np.ndarray,
    num_computed_tokens: np.ndarray,
    block_tables: np.ndarray,
    *,
    block_size: int,
) -> np.ndarray:
    """Writes the slot of each new token, `block * block_size + offset`, and padding after; returns their positions.

    All arrays are int32; the tables are trusted to hold every position.

    Example:
        >>> out, tables = np.empty(4, np.int32), np.array([[3, 7]], np.int32)
        >>> starts, computed = np.array([0, 3], np.int32), np.array([3], np.int32)
        >>> write_slots(out, starts, computed, tables, block_size=4).tolist(), out.tolist()
        ([3, 4, 5], [15, 28, 29, -1])
    """
    positions = compute_positions(query_start_loc, num_computed_tokens)
    sequence = np.repeat(np.arange(query_start_loc.shape[0] - 1), np.diff(query_start_loc))
    column, offset = np.divmod(positions, np.int32(block_size))
    slots = block_tables[sequence, column]
    slots *= block_size
    slots += offset
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
    """Writes positions and slots (int32[T]) of rows with equally many new tokens, and padding; the short way to decode.

    `computed`, int32[S], are the tokens of each row before the step; the tables are contiguous.
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
