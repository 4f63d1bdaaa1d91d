"""Remembers the int32 form of each sequence's block table from step to step, so that only new ids are converted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch_core.errors import InvalidInput

__all__ = ["BlockTableCache"]

_EMPTY = array("i")


class BlockTableCache:
    """The converted tables of the sequences of the last step, for allocators that keep their tables as tuples.

    Converting a tuple costs about 0.03 us an id: milliseconds for a large batch, every step. A tuple never changes, so
    one that comes back as the same object is converted already, and one that has grown needs only its new ids.
    Memory: one int32 for each id of the last step. Not thread-safe.

    Example:
        >>> cache = BlockTableCache()
        >>> table = (3, 9)
        >>> first = cache.convert(["a"], [table])[0]
        >>> cache.convert(["a"], [table])[0] is first, cache.convert(["a"], [(3, 9, 4)])[0].tolist()
        (True, [3, 9, 4])
    """

    def __init__(self) -> None:
        self._seq_ids: list[str | None] = []
        self._tables: list[Sequence[int]] = []
        self._arrays: list[array] = []

    def convert(self, seq_ids: list[str | None], tables: list[Sequence[int]]) -> list[array]:
        """Returns each table as `array("i")`, which the caller must not change, and forgets every other sequence.

        Args:
            seq_ids: the name of each sequence; the names of one call differ.
            tables: its block ids. Only tuples are remembered.

        Raises:
            InvalidInput: a name is None or appears twice.
            TypeError: an id is not an int.
            OverflowError: an id is not an int32.
        """
        if seq_ids == self._seq_ids:
            known, before = self._arrays, self._tables
        else:
            known, before = self._reordered(seq_ids)
        arrays = list(known)
        for index, (table, last) in enumerate(zip(tables, before, strict=True)):
            if table is not last or type(table) is not tuple:
                arrays[index] = _converted(table, last, known[index])
        self._seq_ids, self._tables, self._arrays = seq_ids, tables, arrays
        return arrays

    def _reordered(self, seq_ids: list[str | None]) -> tuple[list[array], list[Sequence[int]]]:
        if None in seq_ids or len(set(seq_ids)) != len(seq_ids):
            raise InvalidInput(
                f"{len(set(seq_ids) - {None})} of {len(seq_ids)} rows have a seq_id of their own; a table cache needs "
                "one for each row. Leave table_cache out otherwise."
            )
        place = {seq_id: index for index, seq_id in enumerate(self._seq_ids)}
        places = [place.get(seq_id) for seq_id in seq_ids]
        known = [_EMPTY if index is None else self._arrays[index] for index in places]
        return known, [() if index is None else self._tables[index] for index in places]


def _converted(table: Sequence[int], last: Sequence[int], known: array) -> array:
    # Equal ids are mostly the same objects, so this comparison costs a tenth of a conversion.
    if type(table) is tuple and table[: len(last)] == last:
        return known + array("i", table[len(last) :])
    return array("i", table)
