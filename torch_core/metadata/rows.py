"""The input of the metadata builders: one row per sequence of the step, and the same seen column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch_core.errors import InvalidInput

__all__ = ["RowColumns", "SequenceRow", "SequenceRowLike"]


class SequenceRowLike(Protocol):
    """Anything that says what one sequence does in one step; the allocator's records qualify as they are.

    Two more attributes are read when they are there: `seq_id`, the name of the sequence, and `group_block_ids`, its
    tables in all cache groups. A sequence of rows may have an attribute `columns`, which maps the name of each field to
    the values of all rows; it is read instead of the rows.
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
            each id, which is what makes large batches cheap; a list or tuple works too.
        num_computed_tokens: tokens in the cache before the step.
        num_new_tokens: tokens of this step.
        seq_id: the name of the sequence, in messages and for a `BlockTableCache`; None for its row number alone.

    Example:
        >>> SequenceRow([3, 9], 17, 1).num_new_tokens
        1
    """

    block_ids: Sequence[int]
    num_computed_tokens: int
    num_new_tokens: int
    seq_id: str | None = None


class RowColumns:
    """The rows of a step, a field at a time; rows that come with `columns` are not read one by one."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, rows: Sequence[SequenceRowLike]) -> None:
        self._rows = rows
        # The interpreter reads an attribute that is written out in half the time of one that is named by a string.
        self._columns: dict[str, Sequence[Any]] = dict(getattr(rows, "columns", ())) or {
            "block_ids": [row.block_ids for row in rows],
            "num_computed_tokens": [row.num_computed_tokens for row in rows],
            "num_new_tokens": [row.num_new_tokens for row in rows],
        }

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
        """Returns the block table of each row, of one cache group when it is given.

        Raises:
            InvalidInput: the rows have no such group.
        """
        if cache_group is None:
            return self["block_ids"]
        try:
            return [tables[cache_group] for tables in self["group_block_ids"]]
        except (AttributeError, IndexError):
            raise InvalidInput(
                f"cache_group is {cache_group}, but a row has no group_block_ids[{cache_group}]; the rows come from an "
                "allocator with fewer cache groups."
            ) from None
