"""Tensors in files, by name: where their bytes lie, and their values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np

from torch_core.base.errors import InvalidInput, Unsupported

#: The floating-point types that weights may be stored in.
STORED_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
#: The types of quantised weights, which need scales, and of their scales.
QUANTIZED_DTYPES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}

#: NaN as a power of two in 8 bits, by the OCP Microscaling specification 1.0.
_E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        shape: its shape.
        dtype: type of its elements as `read_tensor` returns them; None for a type that no weight has.
        offset: its first byte in the file.
        code: the file's name of its type.
        packed: number of its bytes, if they are not its elements one after the other.
        unpack: the elements, one after the other, of uint8[packed].
    """

    shape: tuple[int, ...]
    dtype: np.dtype | None
    offset: int
    code: str = ""
    packed: int | None = None
    unpack: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The checked header of one file, which is not kept open; `stamp` has its inode, size and time of change."""

    path: Path
    tensors: dict[str, StoredTensor]
    stamp: tuple[int, int, int]


#: For each tensor's name the file that holds it.
Tensors: TypeAlias = dict[str, TensorFile]


def read_tensor(file: TensorFile, name: str) -> np.ndarray:
    """Returns one tensor as a view of the file, mapped into memory: the file is read when the view is read.

    Packed tensors are unpacked into an array of their own.
    """
    stored = file.tensors[name]
    dtype = checked_dtype(file, name)
    try:
        if file_stamp(file.path) != file.stamp:
            raise InvalidInput(file.path.name, "was changed while it was read")
        if 0 in stored.shape:
            return np.zeros(stored.shape, dtype)
        if stored.packed is None or stored.unpack is None:
            return np.memmap(file.path, dtype, "r", stored.offset, stored.shape)
        packed = np.memmap(file.path, np.uint8, "r", stored.offset, (stored.packed,))
    except OSError as error:
        raise InvalidInput(file.path.name, f"cannot be read: {error.strerror or error}") from None
    try:
        return stored.unpack(packed).reshape(stored.shape)
    except InvalidInput as error:
        raise error.under(f"tensor {short_name(name)}").under(file.path.name) from None


def computed_tensor(file: TensorFile, name: str, array: np.ndarray) -> TensorFile:
    """Returns a file, of another one's path, with a tensor whose float32 elements are not in it."""
    elements = np.ascontiguousarray(array, np.float32).reshape(-1)
    stored = StoredTensor(array.shape, elements.dtype, 0, "F32", packed=1, unpack=lambda _: elements)
    return TensorFile(file.path, {name: stored}, file.stamp)


def num_bytes(file: TensorFile, name: str) -> int:
    """Returns the number of a tensor's bytes in the file."""
    stored = file.tensors[name]
    return math.prod(stored.shape) * checked_dtype(file, name).itemsize if stored.packed is None else stored.packed


def checked_dtype(file: TensorFile, name: str) -> np.dtype:
    """Returns the type of a tensor's elements, one of `STORED_DTYPES` or `QUANTIZED_DTYPES`."""
    stored = file.tensors[name]
    if stored.dtype is None:
        known = ", ".join(STORED_DTYPES | QUANTIZED_DTYPES)
        text = f"tensor {short_name(name)} has dtype {stored.code!r}; weights may be {known}."
        raise Unsupported(text).under(file.path.name)
    return stored.dtype


def check_scale(file: TensorFile, name: str, scale: np.ndarray) -> None:
    """Refuses a tensor of scales that has NaN or an infinity; uint8 are powers of two."""
    is_nan = scale == _E8M0_NAN if scale.dtype == np.uint8 else ~np.isfinite(scale.astype(np.float32))
    if is_nan.any():
        place = [int(each) for each in np.argwhere(is_nan)[0]]
        raise InvalidInput(f"{file.path.name}: tensor {name!r} is NaN or infinite at {place}; a scale is a number.")


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Returns numbers that change with the file."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def short_name(value: object) -> str:
    """Returns the text of a name for an error."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
