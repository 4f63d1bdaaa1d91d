"""What a Gluon kernel computes with, as numpy arrays: tensors, pointers, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

__all__ = ["DTYPES", "DType", "Pointer", "PointerType", "Shared", "Tensor", "flat_memory", "plain"]


class DType:
    """An element type of the language."""

    def __init__(self, name: str, numpy: Any) -> None:
        self.name, self.numpy = name, np.dtype(numpy)
        self.primitive_bitwidth = 8 * self.numpy.itemsize
        self.element_ty = self


class PointerType:
    """The type of pointers to elements of a type."""

    def __init__(self, element: DType) -> None:
        self.element = element


#: By the language's names.
DTYPES = {
    name: DType(name, numpy)
    for name, numpy in {
        "int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
        "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
        "float8e4nv": ml_dtypes.float8_e4m3fn,
    }.items()
}  # fmt: skip
_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values()}
_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat_memory(tensor: torch.Tensor) -> np.ndarray:
    """Returns what lies from a CPU tensor's first element to the end of its storage; written in place."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    flat = tensor.as_strided((size,), (1,))
    if tensor.dtype == torch.bool:
        return flat.numpy()
    name = str(tensor.dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8e4nv")
    return flat.view(_TORCH_BITS[tensor.element_size()]).numpy().view(DTYPES[name].numpy)


def plain(value: Any) -> Any:
    """Returns a tensor's array; other values as they are."""
    return value.array if isinstance(value, Tensor) else value


class Tensor:
    """A tensor or a scalar; integers are divided as the hardware does, towards zero."""

    #: Layouts say which thread has an element, which no value depends on.
    type = SimpleNamespace(layout=None)

    def __init__(self, array: Any) -> None:
        array = np.asarray(array)
        # The language's own numbers are float32.
        self._array = array.astype(np.float32) if array.dtype == np.float64 else array

    @property
    def array(self) -> np.ndarray:
        """The values."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.array.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return _BY_NUMPY[self.array.dtype]

    def __index__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __getitem__(self, index: Any) -> Any:
        return self.of(self.array[index])

    def of(self, array: np.ndarray) -> Any:
        """The same kind of value over another array."""
        return Tensor(array)

    def reshape(self, shape: Sequence[int]) -> Any:
        """The same elements in another shape."""
        return self.of(self.array.reshape(shape))

    def permute(self, *order: Any) -> Any:
        """The axes in another order."""
        return self.of(self.array.transpose(*order))

    def to(self, dtype: DType, bitcast: bool = False) -> Any:
        """Converts, or takes the same bits as another type."""
        with np.errstate(all="ignore"):
            return Tensor(self.array.view(dtype.numpy) if bitcast else self.array.astype(dtype.numpy))


class Pointer(Tensor):
    """Pointers into the memory of an array: the tensor's elements are offsets."""

    def __init__(self, memory: np.ndarray, offsets: Any = 0) -> None:
        super().__init__(np.asarray(offsets, np.int64))
        self.memory = memory

    @property
    def dtype(self) -> DType:
        """The type of what is pointed to."""
        return _BY_NUMPY[self.memory.dtype]

    def of(self, array: np.ndarray) -> Pointer:
        """Pointers into the same memory."""
        return Pointer(self.memory, array)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        """An address as a number stays a pointer here; pointers of another type point to the same bytes."""
        if not isinstance(dtype, PointerType):
            return self
        new, old = dtype.element.numpy, self.memory.dtype
        size = self.memory.nbytes // new.itemsize * new.itemsize
        bytes_ = self.array * old.itemsize
        if (bytes_ % new.itemsize).any():
            raise ValueError(f"pointers to {new} lie between its elements")
        return Pointer(self.memory.view(np.uint8)[:size].view(new), bytes_ // new.itemsize)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        """What is pointed to, `other` where masked."""
        offsets, live = np.broadcast_arrays(self.array, True if mask is None else plain(mask))
        self._check(offsets[live])
        values = self.memory[np.where(live, offsets, 0)]
        return Tensor(np.where(live, values, np.asarray(plain(other), values.dtype)).astype(values.dtype))

    def store(self, value: Any, mask: Any = None) -> None:
        """Writes where it is not masked."""
        offsets, values, live = np.broadcast_arrays(self.array, plain(value), True if mask is None else plain(mask))
        self._check(offsets[live])
        self.memory[offsets[live]] = values[live].astype(self.memory.dtype)

    def add_to(self, value: Any) -> None:
        """Adds to what is pointed to, element by element."""
        self._check(self.array)
        np.add.at(self.memory, self.array, plain(value))

    def _check(self, offsets: np.ndarray) -> None:
        if offsets.size and not 0 <= offsets.min() <= offsets.max() < len(self.memory):
            raise IndexError(f"offsets {offsets.min()} to {offsets.max()} leave an array of {len(self.memory)}")


class Shared:
    """A part of shared memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.layout = array, None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.array.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return _BY_NUMPY[self.array.dtype]

    @property
    def address(self) -> int:
        """Where it starts."""
        return self.array.__array_interface__["data"][0]

    def index(self, i: Any) -> Shared:
        """One element of the first axis."""
        if not 0 <= int(i) < len(self.array):
            raise IndexError(f"slot {int(i)} of {len(self.array)}")
        return Shared(self.array[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        """A part of one axis."""
        if not 0 <= int(start) <= int(start) + length <= self.array.shape[dim]:
            raise IndexError(f"{length} from {int(start)} on of {self.array.shape[dim]}")
        return Shared(self.array[(slice(None),) * dim + (slice(int(start), int(start) + length),)])

    def permute(self, order: Sequence[int]) -> Shared:
        """The axes in another order."""
        return Shared(self.array.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """The same memory in another shape."""
        return Shared(self.array.reshape(shape))

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any = None) -> Shared:
        """The same bytes as another type; where which byte lies is the layout's, so write before reading.

        With a linear layout, bytes lie as the copy engine leaves them.
        """
        if hasattr(layout, "offset_bases"):
            return SharedWords(self.array, _word_places(self.array.shape, shape, layout))
        return Shared(self.array.reshape(-1).view(dtype.numpy).reshape(shape))

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Tensor:
        """A copy of the values."""
        return Tensor(self.array.copy())

    def store(self, value: Tensor) -> None:
        """Writes all elements."""
        if value.array.shape != self.array.shape or value.array.dtype != self.array.dtype:
            raise TypeError(f"{value.array.dtype}{value.shape} does not fit {self.array.dtype}{self.shape}")
        self.array[...] = value.array


class SharedWords(Shared):
    """Shared memory as words in an order of their own: `places` are their bytes in `memory`, [..., word, 4]."""

    def __init__(self, memory: np.ndarray, places: np.ndarray) -> None:
        super().__init__(memory)
        self._places = places

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._places.shape[:-1]

    def index(self, i: Any) -> SharedWords:
        """One element of the first axis."""
        return SharedWords(self.array, self._places[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> SharedWords:
        """A part of the one axis."""
        return SharedWords(self.array, self._places[int(start) : int(start) + length])

    def load(self, layout: Any = None) -> Tensor:
        """A copy of the words."""
        return Tensor(self._bytes()[self._places].view(np.int32)[..., 0])

    def store(self, value: Tensor) -> None:
        """Writes all words."""
        if value.array.shape != self.shape or value.array.dtype != np.int32:
            raise TypeError(f"{value.array.dtype}{value.shape} does not fit words {self.shape}")
        self._bytes()[self._places] = value.array[..., None].view(np.uint8)

    def _bytes(self) -> np.ndarray:
        return self.array.reshape(-1).view(np.uint8)


def _word_places(tiles: Sequence[int], shape: Sequence[int], layout: Any) -> np.ndarray:
    """Where the bytes of each word lie in tiles of bytes [tile, row, column], as `SharedWords` wants it."""
    rows, columns = tiles[1:]
    width = min(columns, 128)
    row, column = np.indices((rows, columns))
    # Tiles are side by side where they are wider than a swizzled row; pieces of 16 bytes trade places by the row.
    address = row * width + column % width
    address = column // width * rows * width + (address ^ ((address >> 7 & (width // 16 - 1)) << 4))
    order = np.argsort(address.reshape(-1)).reshape(-1, 4)
    everywhere = np.arange(tiles[0])[:, None, None] * (rows * columns) + order
    coordinates = np.zeros(1, np.int64)
    for (base,) in layout.offset_bases:
        coordinates = np.concatenate([coordinates, coordinates ^ base])
    return everywhere.reshape(*shape, 4)[:, np.argsort(coordinates)]


def _divided(a: Any, b: Any) -> Any:
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient * b != a) & ((np.asarray(a) < 0) != (np.asarray(b) < 0)))


def _remainder(a: Any, b: Any) -> Any:
    return a - _divided(a, b) * b


def _operator(function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    def apply(self: Tensor, other: Any) -> Any:
        a, b = (plain(other), self.array) if reflected else (self.array, plain(other))
        kind = self if isinstance(self, Pointer) or not isinstance(other, Pointer) else other
        with np.errstate(all="ignore"):
            return kind.of(function(a, b))

    return apply


_ARITHMETIC = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "floordiv": _divided,
    "mod": _remainder, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift,
    "rshift": np.right_shift,
}  # fmt: skip
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
for _name, _function in {**_ARITHMETIC, **_COMPARISONS}.items():
    setattr(Tensor, f"__{_name}__", _operator(_function))
for _name, _function in _ARITHMETIC.items():
    setattr(Tensor, f"__r{_name}__", _operator(_function, reflected=True))
Tensor.__neg__ = lambda self: Tensor(-self.array)  # type: ignore[attr-defined]
Tensor.__invert__ = lambda self: Tensor(~self.array)  # type: ignore[attr-defined]
Tensor.__hash__ = None  # type: ignore[assignment]
