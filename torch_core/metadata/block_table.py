"""A block table that lives from step to step, so that a step converts only the ids that are new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_core.errors import InvalidInput

__all__ = ["BlockTableBuffer"]


class BlockTableBuffer:
    """A persistent int32 table with one row per slot of the running batch.

    Converting Python lists of ids in every step costs more than all other metadata. The owner of the batch keeps this
    table in step with the allocator instead, and passes `rows(n)` to `build_common_metadata(block_tables=...)`.
    Names follow vLLM's `BlockTable` (`vllm/v1/worker/block_table.py`).

    Args:
        max_num_seqs: rows.
        max_blocks: columns, the blocks of the longest sequence.

    Raises:
        InvalidInput: a size is not positive.

    Example:
        >>> table = BlockTableBuffer(max_num_seqs=2, max_blocks=4)
        >>> table.add_row(0, [5, 6])
        >>> table.append_row(0, [9])
        >>> table.rows(1).tolist()
        [[5, 6, 9, 0]]
    """

    def __init__(self, *, max_num_seqs: int, max_blocks: int) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_blocks", max_blocks)):
            if value < 1:
                raise InvalidInput(f"{name} is {value}; it must be at least 1.")
        self._table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)

    def add_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Replaces a row.

        Raises:
            InvalidInput: there is no such row or it is too narrow; nothing is changed.
        """
        self._check_row(row)
        self._check_room(row, 0, len(block_ids))
        self._table[row, : len(block_ids)] = block_ids
        self._table[row, len(block_ids) :] = 0
        self._num_blocks[row] = len(block_ids)

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Adds blocks to the end of a row.

        Raises:
            InvalidInput: as for `add_row`.
        """
        self._check_row(row)
        start = int(self._num_blocks[row])
        self._check_room(row, start, len(block_ids))
        self._table[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def replace(self, row: int, column: int, block_id: int) -> None:
        """Replaces one block: a tail that was copied, or one that left the window (then by 0, the null block).

        Raises:
            InvalidInput: the row has no such column.
        """
        self._check_row(row)
        if not 0 <= column < self._num_blocks[row]:
            raise InvalidInput(
                f"Column {column} of row {row} is not in use; the row has {self._num_blocks[row]} blocks."
            )
        self._table[row, column] = block_id

    def move_row(self, source: int, target: int) -> None:
        """Copies a row over another one and clears the first."""
        self._check_row(source)
        self._check_row(target)
        if source != target:
            self._table[target] = self._table[source]
            self._num_blocks[target] = self._num_blocks[source]
            self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        self._check_row(first)
        self._check_row(second)
        self._table[[first, second]] = self._table[[second, first]]
        self._num_blocks[[first, second]] = self._num_blocks[[second, first]]

    def clear_row(self, row: int) -> None:
        """Empties a row."""
        self._check_row(row)
        self._table[row] = 0
        self._num_blocks[row] = 0

    def num_blocks(self, row: int) -> int:
        """Returns how many blocks a row has."""
        self._check_row(row)
        return int(self._num_blocks[row])

    def rows(self, count: int) -> np.ndarray:
        """Returns the first `count` rows, int32[count, max_blocks], as a read-only view that later calls change."""
        if not 0 <= count <= self._table.shape[0]:
            raise InvalidInput(f"count is {count}; the table has {self._table.shape[0]} rows.")
        view = self._table[:count]
        view.setflags(write=False)
        return view

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self._table.shape[0]:
            raise InvalidInput(f"row is {row}; the table has rows 0..{self._table.shape[0] - 1}.")

    def _check_room(self, row: int, start: int, count: int) -> None:
        if start + count > self._table.shape[1]:
            raise InvalidInput(
                f"Row {row} would have {start + count} blocks; the table has {self._table.shape[1]} columns. Make it "
                "with a larger max_blocks."
            )
