"""From block tables to slots: where in the cache each new token is written."""

from __future__ import annotations

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
