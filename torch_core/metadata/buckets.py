"""Frozen lists of padded sizes, so that a program is compiled or captured for few shapes only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, RequestTooLong


@dataclass(frozen=True, slots=True)
class Buckets:
    """A strictly increasing list of sizes that a value may be padded to.

    Attributes:
        name: the padded quantity; used in messages.
        sizes: the allowed sizes, positive and strictly increasing.

    Raises:
        InvalidInput: the sizes are empty, not positive or not increasing.

    Example:
        >>> buckets = Buckets.powers_of_two("num_seqs", 6)
        >>> buckets.sizes, buckets.pad(3)
        ((1, 2, 4, 6), 4)
    """

    name: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise InvalidInput("sizes", value=self.sizes, wanted=f"the buckets of {self.name} must be at least one")
        for index, size in enumerate(self.sizes):
            before = self.sizes[index - 1] if index else 0
            if isinstance(size, bool) or not isinstance(size, int) or size <= before:
                wanted = "sizes must be ints that are positive and strictly increasing"
                raise InvalidInput(f"sizes[{index}]", f"of {self.name} is {size!r} after {before}", wanted)

    @classmethod
    def powers_of_two(cls, name: str, largest: int, *, smallest: int = 1) -> Buckets:
        """Returns the powers of two from `smallest` (rounded up to one) below `largest`, and `largest` itself."""
        for which, size in (("largest", largest), ("smallest", smallest)):
            check_int(f"The {which} bucket of {name}", size, 1)
        sizes = []
        size = 1 << (smallest - 1).bit_length()
        while size < largest:
            sizes.append(size)
            size *= 2
        return cls(name, (*sizes, largest))

    @property
    def largest(self) -> int:
        """The largest size that can be served."""
        return self.sizes[-1]

    def pad(self, value: int) -> int:
        """Returns the smallest size that holds `value`.

        Raises:
            InvalidInput: `value` is negative.
            RequestTooLong: `value` is beyond the largest size.
        """
        if value < 0:
            raise InvalidInput(self.name, value=value, wanted="it cannot be negative")
        index = bisect_left(self.sizes, value)
        if index == len(self.sizes):
            wanted = f"the largest bucket is {self.sizes[-1]}. Split the step, or configure a larger bucket"
            raise RequestTooLong(self.name, value=value, wanted=wanted)
        return self.sizes[index]
