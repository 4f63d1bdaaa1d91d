"""The slots of a step: where each new token is written in the cache, and where each sequence keeps its state."""

from __future__ import annotations

import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.check import row_name
from torch_core.metadata.rows import RowColumns


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


def state_layout(num_seqs: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the `extra` of `metadata_layout` that gives room for the state slots of `num_seqs` sequences."""
    return [("state_slots", (num_seqs,))]


def write_state_slots(rows: RowColumns, out: np.ndarray, num_slots: int) -> None:
    """Writes the `state_slot` of each row into int32[num_seqs], and -1 for padding.

    Raises:
        InvalidInput: a row has no `state_slot`; one is not an int from 1 to `num_slots - 1`, since slot 0 is the null
            slot; or two rows have the same.
    """
    try:
        slots = rows["state_slot"]
    except AttributeError:
        wanted = "rows of layers with a state have one, as those of a CacheManager with CacheConfig.states"
        raise InvalidInput("rows", "have no state_slot", wanted) from None
    owners: dict[int, int] = {}
    for index, slot in enumerate(slots):
        if type(slot) is not int or not 0 < slot < num_slots:
            wanted = f"it must be an int from 1 to {num_slots - 1}; slot 0 is the null slot"
            raise InvalidInput("state_slot", f"of {row_name(index, rows.seq_ids())} is {slot!r}", wanted)
        if owners.setdefault(slot, index) != index:
            problem = f"of {row_name(index, rows.seq_ids())} is {slot}, which row {owners[slot]} has too"
            raise InvalidInput("state_slot", problem, "give each sequence its own")
    out[: len(slots)] = slots
    out[len(slots) :] = PAD_SLOT_ID
