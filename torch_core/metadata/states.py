"""The state slots of a step's sequences, for layers that keep a recurrent state: int32, checked on the host."""

from __future__ import annotations

import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.check import row_name
from torch_core.metadata.rows import RowColumns


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
