"""Block tables of many rows as one int32 table; the form of each is remembered, so that only new ids are converted."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not
from typing import Any

import numpy as np

from torch_core.base.errors import InvalidInput
from torch_core.metadata.check import SeqIds, check_block_tables, row_name

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
            problem = f"of {len(seq_ids)} rows are {len(set(seq_ids) - {None})} names"
            raise InvalidInput("seq_ids", problem, "a table cache needs one for each. Leave table_cache out otherwise")
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


def write_checked_tables(
    tables: Sequence[Any],
    out: np.ndarray,
    totals: np.ndarray,
    new: np.ndarray,
    *,
    block_size: int,
    num_blocks: int,
    seq_ids: Callable[[], Sequence[str | None]],
    window_left: int | None = None,
    table_cache: BlockTableCache | None = None,
) -> None:
    """Writes the tables to the first rows of `out`, int32 and wide enough, and zeros to the others; checks the ids.

    `totals` and `new`, int[rows], are the tokens of each row after the step and of the step; the other arguments are
    those of `build_common_metadata`. Raises InvalidInput for a table that is too short, or has an id that the step must
    not follow.
    """
    if len(tables) < len(out):
        out[len(tables) :] = 0
        out = out[: len(tables)]
    converted = write_tables(
        tables, out, -(-totals // block_size), totals, block_size=block_size, seq_ids=seq_ids, table_cache=table_cache
    )
    # Ids that the cache has seen were checked before, and need no search in each table.
    if not (converted and table_cache is not None and 0 < table_cache.least <= table_cache.most < num_blocks):
        pool: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks}
        check_block_tables(out, totals, new, **pool, window_left=window_left, seq_ids=seq_ids, tails_are_zero=True)


def write_tables(
    tables: Sequence[Any],
    out: np.ndarray,
    live: np.ndarray,
    totals: np.ndarray,
    *,
    block_size: int,
    seq_ids: Callable[[], Sequence[str | None]],
    table_cache: BlockTableCache | None = None,
) -> bool:
    """Writes the first `live` ids of each table, then zeros, to the rows of `out`, int32 and wide enough.

    A `table_cache` converts the tables instead, and knows this call's rows afterwards; returns whether it did. `totals`
    (tokens of each row) and `block_size` are for messages. Raises InvalidInput for a table that is too short or holds
    something that is not an int32.
    """
    if table_cache is not None and _write_converted(tables, out, live, seq_ids, table_cache):
        return True
    needed = live.tolist()
    if (
        list(map(len, tables)) != needed
        or set(map(type, tables)) != {array}
        or {ids.typecode for ids in tables} != {"i"}
    ):
        tables = [
            _first_ids(index, ids, count, int(totals[index]), block_size, seq_ids)
            for index, (ids, count) in enumerate(zip(tables, needed, strict=True))
        ]
    # Joining buffers costs 0.2 us a row, numpy's assignment 0.6 us, the conversion of a list 0.03 us an id.
    zeros = bytes(4 * out.shape[1])
    tails = {count: zeros[4 * count :] for count in set(needed)}
    pieces: list = [None] * (2 * len(tables))
    pieces[::2] = tables
    pieces[1::2] = [tails[count] for count in needed]
    out[:] = np.frombuffer(b"".join(pieces), np.int32).reshape(out.shape)
    return False


def _write_converted(
    tables: Sequence[Any],
    out: np.ndarray,
    live: np.ndarray,
    seq_ids: Callable[[], Sequence[str | None]],
    table_cache: BlockTableCache,
) -> bool:
    """Does the work of `write_tables` with a cache; returns False on a fault, which `write_tables` then finds."""
    try:
        rows, lens = table_cache.convert(seq_ids(), tables)
    except (TypeError, OverflowError):
        return False
    columns = min(out.shape[1], rows.shape[1])
    # The bytes of a few hundred lengths compare in a tenth of the time of a reduction.
    if lens.tobytes() == live.tobytes():
        out[:, :columns] = rows[:, :columns]
    elif (lens < live).any():
        return False
    else:
        np.multiply(rows[:, :columns], np.arange(columns) < live[:, None], out=out[:, :columns])
    if columns < out.shape[1]:
        out[:, columns:] = 0
    return True


def _first_ids(
    index: int, ids: Sequence[int], needed: int, total: int, block_size: int, seq_ids: Callable[[], SeqIds]
) -> np.ndarray | array:
    if len(ids) < needed:
        wanted = f"its {total} tokens need {needed} blocks of {block_size}. Allocate before building"
        raise InvalidInput("block_ids", f"of {row_name(index, seq_ids())} has {len(ids)} blocks", wanted)
    if isinstance(ids, np.ndarray):
        if ids.dtype != np.int32 or ids.ndim != 1:
            problem = f"of {row_name(index, seq_ids())} has dtype {ids.dtype} and rank {ids.ndim}"
            wanted = "int32 of rank 1 is required. Use block_ids.astype(np.int32)"
            raise InvalidInput("block_ids", problem, wanted)
        return np.ascontiguousarray(ids[:needed])
    if isinstance(ids, array) and ids.typecode == "i":
        return ids[:needed]
    try:
        return array("i", ids[:needed])
    except (TypeError, OverflowError) as error:
        problem = f"of {row_name(index, seq_ids())} holds something that is not an int32 block id ({error})"
        raise InvalidInput("block_ids", problem) from None
