"""The lengths of a step's rows: checked ints, their sums and maxima, and whether all rows are alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.metadata.check import row_name
from torch_core.metadata.rows import RowColumns

__all__ = ["Lengths", "lengths_of"]

_INT32_MAX = np.iinfo(np.int32).max


class Lengths(NamedTuple):
    """What the rows of a step say about their lengths.

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
    """Reads and checks the lengths of the rows.

    Raises:
        InvalidInput: a number is not an int, negative, beyond an int32, or 0 where it must not be.
    """
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
    if longest > _INT32_MAX:
        raise InvalidInput(f"sequence length is {longest}; int32 metadata allow at most {_INT32_MAX}.")
    return Lengths(computed, new, computed + new, num_new, longest_query, longest, uniform)


def _are_alike(values: Sequence[int]) -> bool:
    """Says whether the values are one and the same positive int32; False means to look closer."""
    if not values or values.count(values[0]) != len(values):
        return False
    try:
        # 1.0 equals 1, but one float among ints makes the sum a float.
        return type(sum(values)) is int and 1 <= values[0] <= _INT32_MAX
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
            (index for index, value in enumerate(values) if not isinstance(value, int) or abs(value) > _INT32_MAX), 0
        )
        raise InvalidInput(
            f"{name} of {row_name(bad, rows.seq_ids())} is {values[bad]!r}; it must be an int up to {_INT32_MAX}."
        ) from None
    # Python's own: of the few numbers of a step, numpy's first reduction costs more than all the rest of this.
    if min(values, default=smallest) < smallest:
        index = int(np.argmax(out < smallest))
        raise InvalidInput(
            f"{name} of {row_name(index, rows.seq_ids())} is {out[index]}; it must be at least {smallest}. Leave a "
            "sequence that does nothing out of the step."
        )
    return out, max(values, default=0)


@lru_cache(maxsize=64)
def _alike(count: int, value: int) -> np.ndarray:
    values = np.full(count, value, np.int32)
    values.setflags(write=False)
    return values
