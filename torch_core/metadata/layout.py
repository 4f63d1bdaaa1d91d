"""The packed form of a step's int32 arrays: one contiguous buffer, so one host-to-device copy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_core.base.errors import InvalidInput

# 128 bytes: Triton specialises on 16-byte aligned pointers, and a cache line is never shared by two fields.
_ALIGN_ELEMENTS = 32


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """The place of one array in the packed buffer: `buffer[offset : offset + size].reshape(shape)`.

    Attributes:
        name: the field's name.
        offset: first element, a multiple of 32 elements (128 bytes).
        shape: the array's shape.
        size: elements of the array.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    size: int = field(init=False, repr=False, compare=False)
    _part: slice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))
        object.__setattr__(self, "_part", slice(self.offset, self.offset + self.size))

    def of(self, buffer: Any) -> Any:
        """Returns this field of a numpy, torch or JAX buffer: a view for the first two, a slice inside jit."""
        part = buffer[self._part]
        return part if len(self.shape) == 1 else part.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The static plan of a packed int32 buffer; hashable, so it can be a static argument of a jitted function.

    Attributes:
        fields: name, offset and shape of each array, in order.
        num_elements: the length of the whole buffer.

    Example:
        >>> layout = PackedLayout.of_shapes([("seq_lens", (3,)), ("block_tables", (3, 2))])
        >>> [(entry.name, entry.offset) for entry in layout.fields], layout.num_elements
        ([('seq_lens', 0), ('block_tables', 32)], 64)
        >>> layout.unpack(np.zeros(64, np.int32))["block_tables"].shape
        (3, 2)
    """

    fields: tuple[FieldLayout, ...]
    num_elements: int
    _by_name: dict[str, FieldLayout] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.fields})

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> PackedLayout:
        """Lays the named arrays out one after the other, each 128-byte aligned.

        Raises:
            InvalidInput: two arrays have one name, or a size is negative.
        """
        fields = []
        seen = set()
        offset = 0
        for name, shape in shapes:
            if name in seen:
                raise InvalidInput("shapes", f"names {name!r} twice", "names must differ")
            if any(size < 0 for size in shape):
                raise InvalidInput("shapes", f"gives {name!r} the shape {shape}", "sizes cannot be negative")
            seen.add(name)
            fields.append(FieldLayout(name, offset, tuple(shape)))
            offset += -(-math.prod(shape) // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS
        return cls(tuple(fields), offset)

    def __getitem__(self, name: str) -> FieldLayout:
        """Returns the place of one field.

        Raises:
            InvalidInput: the field does not exist.
        """
        entry = self._by_name.get(name)
        if entry is None:
            raise InvalidInput("name", value=name, wanted=f"the packed layout has {', '.join(self._by_name)}")
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def unpack(self, buffer: Any) -> dict[str, Any]:
        """Returns every field of `buffer`, which may be a numpy array, a torch tensor or a (traced) JAX array.

        Raises:
            InvalidInput: `buffer` is not one-dimensional with `num_elements` elements.
        """
        if tuple(buffer.shape) != (self.num_elements,):
            wanted = f"this layout needs ({self.num_elements},). It was packed for other sizes"
            raise InvalidInput("buffer", f"has shape {tuple(buffer.shape)}", wanted)
        return {entry.name: entry.of(buffer) for entry in self.fields}

    def views(self, buffer: np.ndarray, names: Iterable[str]) -> list[np.ndarray]:
        """Returns fields of a host buffer by name, as views in that order."""
        found = []
        for name in names:
            entry = self._by_name.get(name) or self[name]
            part = buffer[entry._part]
            found.append(part if len(entry.shape) == 1 else part.reshape(entry.shape))
        return found

    def check_buffer(self, buffer: np.ndarray) -> None:
        """Checks that a host buffer can be packed into.

        Raises:
            InvalidInput: wrong dtype or length, strided or read-only.
        """
        if buffer.dtype != np.int32 or buffer.shape != (self.num_elements,):
            wanted = f"this layout needs int32[{self.num_elements}]"
            raise InvalidInput("buffer", f"is {buffer.dtype}{list(buffer.shape)}", wanted)
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise InvalidInput("buffer", "is strided or read-only", "give a contiguous, writeable array")


def metadata_layout(
    *, num_seqs: int, num_tokens: int, max_blocks: int, extra: Iterable[tuple[str, tuple[int, ...]]] = ()
) -> PackedLayout:
    """Returns the layout of a step's attention metadata, with room for other int32 arrays of the step.

    Args:
        num_seqs: padded number of sequences.
        num_tokens: padded number of new tokens.
        max_blocks: columns of the block tables.
        extra: names and shapes of more int32 arrays that travel in the same copy, such as
            `("token_ids", (num_tokens,))`; the builder leaves them to the caller.

    Example:
        >>> metadata_layout(num_seqs=2, num_tokens=4, max_blocks=8)["block_tables"].shape
        (2, 8)
    """
    return PackedLayout.of_shapes(
        [
            ("query_start_loc", (num_seqs + 1,)),
            ("seq_lens", (num_seqs,)),
            ("slot_mapping", (num_tokens,)),
            ("positions", (num_tokens,)),
            ("block_tables", (num_seqs, max_blocks)),
            *extra,
        ]
    )
