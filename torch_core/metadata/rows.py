"""The input of the metadata builders: one row per sequence of the step, and the same seen column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from torch_core.errors import InvalidInput

__all__ = ["RowColumns", "SequenceRow", "SequenceRowLike"]

_NEEDED = {"block_ids", "num_computed_tokens", "num_new_tokens"}


class SequenceRowLike(Protocol):
    """Anything that says what one sequence does in one step; the allocator's records qualify as they are.

    Two more attributes are read when they are there: `seq_id`, the name of the sequence, and `group_block_ids`, its
    tables in all cache groups.
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
    """The rows of a step, a field at a time.

    Named tuples of one kind, which allocators hand out by the hundred, are turned around as a whole: that costs a
    fifth of reading them attribute by attribute.
    """

    __slots__ = ("_columns", "_rows")

    def __init__(self, rows: Sequence[SequenceRowLike]) -> None:
        self._rows = rows
        self._columns: dict[str, tuple] | None = None
        names = getattr(rows[0], "_fields", ()) if rows else ()
        if _NEEDED.issubset(names) and list(map(type, rows)).count(type(rows[0])) == len(rows):
            turned: Any = zip(*rows, strict=False)  # type: ignore[misc]
            self._columns = dict(zip(names, turned, strict=True))

    def __getitem__(self, name: str) -> list[Any]:
        """Returns the field of every row, in order; raises AttributeError if a row has none of that name."""
        if self._columns is not None and name in self._columns:
            return list(self._columns[name])
        return list(map(attrgetter(name), self._rows))

    def seq_ids(self) -> list[str | None]:
        """Returns the `seq_id` of each row, None for one without."""
        try:
            return self["seq_id"]
        except AttributeError:
            return [getattr(row, "seq_id", None) for row in self._rows]

    def tables(self, cache_group: int | None) -> list[Sequence[int]]:
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
