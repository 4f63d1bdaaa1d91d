"""Remembers the int32 form of each sequence's block table from step to step, so that only new ids are converted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress, count
from operator import is_not

import numpy as np

from torch_core.base.errors import InvalidInput

__all__ = ["BlockTableCache"]

_NEVER_SEEN = object()


class BlockTableCache:
    """The converted tables of the sequences of the last step, for allocators that keep their tables as tuples.

    Converting a tuple costs about 0.03 us an id: milliseconds for a large batch, every step. A tuple never changes, so
    one that comes back as the same object is converted already, and one that has grown needs only its new ids.
    Memory: one int32 for each id of the last step. Not thread-safe.

    Attributes:
        least: the smallest id of all tables so far, or 1; when it is positive, no id has been beyond `most`.
        most: the largest, or 0.

    Example:
        >>> cache = BlockTableCache()
        >>> table = (3, 9)
        >>> cache.convert(["a"], [table])[0].tolist(), cache.convert(["a"], [(*table, 4)])[0][:, :3].tolist()
        ([[3, 9]], [[3, 9, 4]])
    """

    def __init__(self) -> None:
        self._seq_ids: list[str | None] = []
        self._tables: list[object] = []
        self._rows = np.zeros((0, 0), np.int32)
        self._lens = np.zeros(0, np.int32)
        self.least, self.most = 1, 0

    def convert(self, seq_ids: Sequence[str | None], tables: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Converts new blocks and forgets every sequence that is not named.

        Args:
            seq_ids: the name of each sequence; the names of one call differ.
            tables: its block ids. Only tuples are remembered.

        Returns:
            int32[sequences, columns]: the ids of each table, then zeros; int32[sequences]: how many there are. Both
            belong to the cache, and the next call changes them.

        Raises:
            InvalidInput: a name is None or appears twice.
            TypeError: an id is not an int.
            OverflowError: an id is not an int32.
        """
        seq_ids = list(seq_ids)
        if seq_ids != self._seq_ids:
            self._reorder(seq_ids)
        # In C throughout: in most steps one table in sixteen has changed.
        for index in compress(count(), map(is_not, tables, self._tables)):
            self._update(index, tables[index])
        return self._rows, self._lens

    def _reorder(self, seq_ids: list[str | None]) -> None:
        if None in seq_ids or len(set(seq_ids)) != len(seq_ids):
            raise InvalidInput(
                f"{len(set(seq_ids) - {None})} of {len(seq_ids)} rows have a seq_id of their own; a table cache needs "
                "one for each row. Leave table_cache out otherwise."
            )
        place = {seq_id: index for index, seq_id in enumerate(self._seq_ids)}
        places = np.array([place.get(seq_id, -1) for seq_id in seq_ids], np.int64)
        kept = np.flatnonzero(places >= 0)
        rows = np.zeros((len(seq_ids), self._rows.shape[1]), np.int32)
        lens = np.zeros(len(seq_ids), np.int32)
        rows[kept], lens[kept] = self._rows[places[kept]], self._lens[places[kept]]
        tables = [_NEVER_SEEN if index < 0 else self._tables[index] for index in places.tolist()]
        # In this order an interrupt leaves an empty cache.
        self._seq_ids = []
        self._tables, self._rows, self._lens = tables, rows, lens
        self._seq_ids = seq_ids

    def _update(self, index: int, table: Sequence[int]) -> None:
        last, stop = self._tables[index], len(table)
        # Equal ids are mostly the same objects, so this comparison costs a tenth of a conversion.
        start = len(last) if type(last) is tuple and type(table) is tuple and table[: len(last)] == last else 0
        # An interrupt here leaves a row that is converted again.
        self._tables[index] = _NEVER_SEEN
        if stop > self._rows.shape[1]:
            grown = np.zeros((self._rows.shape[0], max(stop, 2 * self._rows.shape[1])), np.int32)
            grown[:, : self._rows.shape[1]] = self._rows
            self._rows = grown
        if stop == start + 1 and type(table[start]) is int:
            # Most tables that changed have grown by one block.
            least = most = self._rows[index, start] = table[start]
        else:
            ids = array("i", table[start:])
            self._rows[index, start:stop] = ids
            # Once a null block was seen, as windows leave them, the range says no more.
            least, most = (min(ids), max(ids)) if ids and self.least > 0 else (self.least, self.most)
        if least < self.least:
            self.least = least
        if most > self.most:
            self.most = most
        if not start:
            self._rows[index, stop:] = 0
        self._lens[index] = stop
        if type(table) is tuple:
            self._tables[index] = table
