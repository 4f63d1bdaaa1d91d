"""The lengths of a step's rows: checked ints, their sums and maxima, and whether all rows are alike."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.metadata.check import row_name
from torch_core.metadata.rows import RowColumns

__all__ = ["Lengths", "lengths_of"]

_INT32_MAX = np.iinfo(np.int32).max

# From so many rows on, numpy's minimum and maximum are quicker than Python's own.
_MANY_ROWS = 64


class Lengths(NamedTuple):
    """What the rows of a step say about their lengths.

    Attributes:
        computed: int64[S], tokens before the step.
        new: int64[S], tokens of the step.
        totals: int64[S], tokens after it.
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
    """Reads and checks the lengths of the rows.

    Raises:
        InvalidInput: a number is not an int, negative, beyond an int32, or 0 where it must not be.
    """
    before, added = rows["num_computed_tokens"], rows["num_new_tokens"]
    computed, most_computed = _ints("num_computed_tokens", before, rows, smallest=0)
    if _are_alike(added):
        query_len = int(added[0])
        new = np.full(len(added), query_len, np.int64)
        num_new, longest = query_len * len(added), most_computed + query_len
        return Lengths(computed, new, computed + query_len, num_new, query_len, longest, query_len)
    new, longest_query = _ints("num_new_tokens", added, rows, smallest=1)
    totals = computed + new
    return Lengths(computed, new, totals, sum(added), longest_query, int(totals.max(initial=0)), 0)


def _are_alike(values: list[int]) -> bool:
    """Says whether the values are one and the same positive int32; False means to look closer."""
    if not values or values.count(values[0]) != len(values):
        return False
    try:
        # 1.0 equals 1, but one float among ints makes the sum a float.
        return type(sum(values)) is int and 1 <= values[0] <= _INT32_MAX
    except TypeError:
        return False


def _ints(name: str, values: list[int], rows: RowColumns, *, smallest: int) -> tuple[np.ndarray, int]:
    """Returns the values as an array, and the largest."""
    try:
        # array() takes whole numbers only, where numpy would cut a float; it is also the faster of the two.
        out = np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        bad = next(
            (index for index, value in enumerate(values) if not isinstance(value, int) or abs(value) > _INT32_MAX), 0
        )
        raise InvalidInput(
            f"{name} of {row_name(bad, rows.seq_ids())} is {values[bad]!r}; it must be an int up to {_INT32_MAX}."
        ) from None
    if not values:
        return out, 0
    if len(values) < _MANY_ROWS:
        least, most = min(values), max(values)
    else:
        least, most = int(out.min()), int(out.max())
    if least < smallest:
        index = int(np.argmax(out < smallest))
        raise InvalidInput(
            f"{name} of {row_name(index, rows.seq_ids())} is {out[index]}; it must be at least {smallest}. Leave a "
            "sequence that does nothing out of the step."
        )
    return out, most
