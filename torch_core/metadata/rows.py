"""The input of the metadata builders: one row per sequence of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SequenceRow", "SequenceRowLike"]


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
