"""The input of the metadata builders: one row per sequence of the step, the same by columns, and checked lengths."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput
from torch_core.metadata.check import row_name


class SequenceRowLike(Protocol):
    """The work of one sequence in one step; the allocator's records satisfy this protocol.

    More attributes are read when they are there: `seq_id`, the name of the sequence, `group_block_ids`, its tables in
    all cache groups, and `state_slot`, the slot of its recurrent state. A sequence of rows may have an attribute
    `columns`, which maps the name of each field to the values of all rows; it is read instead of the rows.
    """

    @property
    def block_ids(self) -> Sequence[int]:
        """Blocks of the sequence in order, at least `ceil((num_computed_tokens + num_new_tokens) / block_size)`."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that are in the cache before the step."""
        ...

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the step computes and writes; at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """The plainest `SequenceRowLike`.

    Attributes:
        block_ids: as in `SequenceRowLike`. An `array.array("i")` or an int32 numpy array is read without converting
            each id, which makes large batches cheap; a list or tuple works too.
        num_computed_tokens: tokens in the cache before the step.
        num_new_tokens: tokens of this step.
        seq_id: the name of the sequence, in messages and for a `BlockTableCache`; None for its row number alone.
        state_slot: slot of its recurrent state; 0 for none.

    Example:
        >>> SequenceRow([3, 9], 17, 1).num_new_tokens
        1
    """

    block_ids: Sequence[int]
    num_computed_tokens: int
    num_new_tokens: int
    seq_id: str | None = None
    state_slot: int = 0


class RowColumns:
    """The rows of a step, a field at a time; rows that come with `columns` are not read one by one."""

    __slots__ = ("_columns", "_rows", "num_rows")

    def __init__(self, rows: Sequence[SequenceRowLike]) -> None:
        self._rows = rows
        try:
            self.num_rows = len(rows)
            # The interpreter reads an attribute that is written out in half the time of one that is named by a string.
            self._columns: dict[str, Sequence[Any]] = dict(getattr(rows, "columns", ())) or {
                "block_ids": [row.block_ids for row in rows],
                "num_computed_tokens": [row.num_computed_tokens for row in rows],
                "num_new_tokens": [row.num_new_tokens for row in rows],
            }
        except (AttributeError, TypeError) as error:
            raise _no_rows(rows) from error

    def __getitem__(self, name: str) -> Sequence[Any]:
        """Returns the field of every row, in order; raises AttributeError if a row has none of that name."""
        if name not in self._columns:
            self._columns[name] = [getattr(row, name) for row in self._rows]
        return self._columns[name]

    def seq_ids(self) -> Sequence[str | None]:
        """Returns the `seq_id` of each row, None for one without."""
        if "seq_id" not in self._columns:
            try:
                self._columns["seq_id"] = [row.seq_id for row in self._rows]  # type: ignore[attr-defined]
            except AttributeError:
                self._columns["seq_id"] = [getattr(row, "seq_id", None) for row in self._rows]
        return self._columns["seq_id"]

    def tables(self, cache_group: int | None) -> Sequence[Sequence[int]]:
        """Returns the block table of each row, of one cache group when it is given and exists."""
        if cache_group is None:
            return self["block_ids"]
        try:
            return [tables[cache_group] for tables in self["group_block_ids"]]
        except (AttributeError, IndexError):
            problem = f"is {cache_group}, but a row has no group_block_ids[{cache_group}]"
            wanted = "the rows come from an allocator with fewer cache groups"
            raise InvalidInput("cache_group", problem, wanted) from None


class Lengths(NamedTuple):
    """The lengths of a step's rows.

    Attributes:
        computed: int32[S], tokens before the step.
        new: int32[S], tokens of the step.
        totals: int32[S], tokens after it.
        num_new: new tokens of all rows.
        longest_query: the most new tokens of one row.
        longest: the most tokens of one row after the step.
        uniform: the number of new tokens of every row, when it is one; 0 otherwise.
    """

    computed: np.ndarray
    new: np.ndarray
    totals: np.ndarray
    num_new: int
    longest_query: int
    longest: int
    uniform: int


def lengths_of(rows: RowColumns) -> Lengths:
    """Reads the lengths of the rows; raises InvalidInput for anything but ints in the range of an int32."""
    added = rows["num_new_tokens"]
    computed, most_computed = _ints("num_computed_tokens", rows, smallest=0)
    if _are_alike(added):
        uniform = longest_query = int(added[0])
        new, num_new = _alike(len(added), uniform), uniform * len(added)
        longest = most_computed + uniform
    else:
        new, longest_query = _ints("num_new_tokens", rows, smallest=1)
        uniform, num_new = 0, sum(added)
        longest = int(np.add(computed, new, dtype=np.int64).max(initial=0))
    if longest > INT32_MAX:
        wanted = f"int32 metadata allow {INT32_MAX}"
        raise InvalidInput("num_new_tokens", f"and num_computed_tokens of a sequence are {longest}", wanted)
    return Lengths(computed, new, computed + new, num_new, longest_query, longest, uniform)


def _no_rows(rows: Any) -> InvalidInput:
    """Returns the error for what is no sequence of rows, with the first object that is no row."""
    if not isinstance(rows, Sequence):
        return InvalidInput("rows", f"is a {type(rows).__name__}", "it must be a list of SequenceRow")
    fields = ("block_ids", "num_computed_tokens", "num_new_tokens")
    missing = (index for index, row in enumerate(rows) if not all(hasattr(row, field) for field in fields))
    bad = next(missing, 0)
    return InvalidInput(
        f"rows[{bad}]", f"is a {type(rows[bad]).__name__}", f"a SequenceRow has {', '.join(fields)}; build one"
    )


def _are_alike(values: Sequence[int]) -> bool:
    """Says whether the values are one and the same positive int32; False means to look closer."""
    if not values or values.count(values[0]) != len(values):
        return False
    try:
        # 1.0 equals 1, but one float among ints makes the sum a float.
        return type(sum(values)) is int and 1 <= values[0] <= INT32_MAX
    except TypeError:
        return False


def _ints(name: str, rows: RowColumns, *, smallest: int) -> tuple[np.ndarray, int]:
    """Returns a column as int32, and its largest value."""
    values = rows[name]
    try:
        # array() takes whole numbers only, where numpy would cut a float; it is also the faster of the two.
        out = np.frombuffer(array("i", values), np.int32)
    except (TypeError, OverflowError):
        bad = next(
            (index for index, value in enumerate(values) if not isinstance(value, int) or abs(value) > INT32_MAX), 0
        )
        wanted = f"it must be an int up to {INT32_MAX}"
        raise InvalidInput(name, f"of {row_name(bad, rows.seq_ids())} is {values[bad]!r}", wanted) from None
    # Python's own: of the few numbers of a step, numpy's first reduction costs more than all the rest of this.
    if min(values, default=smallest) < smallest:
        index = int(np.argmax(out < smallest))
        wanted = f"it must be at least {smallest}. Leave a sequence that does nothing out of the step"
        raise InvalidInput(name, f"of {row_name(index, rows.seq_ids())} is {out[index]}", wanted)
    return out, max(values, default=0)


@lru_cache(maxsize=64)
def _alike(count: int, value: int) -> np.ndarray:
    values = np.full(count, value, np.int32)
    values.setflags(write=False)
    return values
