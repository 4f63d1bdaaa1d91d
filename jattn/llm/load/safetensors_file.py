"""Reads one safetensors file defensively: size, kind and header are checked before a tensor is touched.

The rules of the format (github.com/huggingface/safetensors, README) are the library's to check: types, shapes, byte
ranges that follow each other and cover the file. Around it are limits that are narrower than its own (a header of
100 MB, no cap on entries), a word on pickles, and the two things it lets pass: a name that is there twice, and fields
that the format does not have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jattn.llm.load.folder import read_json
from torch_core.base.errors import InvalidInput, Unsupported

_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 50_000
_MAX_RANK = 8
#: The floating-point types that weights may be stored in.
STORED_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
#: The types of quantised weights, which need scales, and of their scales.
QUANTIZED_DTYPES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in its file, and its dtype: None for a type that no weight has; `code` is the file's."""

    shape: tuple[int, ...]
    dtype: np.dtype | None
    offset: int
    code: str = ""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The checked header of one file, which is not kept open; `stamp` has its inode, size and time of change."""

    path: Path
    tensors: dict[str, StoredTensor]
    stamp: tuple[int, int, int]


#: For each tensor's name the file that holds it.
Tensors: TypeAlias = dict[str, SafetensorsFile]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Reads and checks the header."""
    name = path.name
    try:
        stamp = _stamp(path)
        with path.open("rb") as file:
            start = file.read(9)
            _refuse_pickle(start, name)
            length = int.from_bytes(start[:8], "little")
            if length > _MAX_HEADER_BYTES:
                raise InvalidInput(f"{name}: the header length is {length}; at most {_MAX_HEADER_BYTES} are read.")
            header = start[8:] + file.read(max(length - 1, 0))
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            if len(names) > _MAX_TENSORS:
                raise InvalidInput(f"{name}: the header lists {len(names)} tensors; at most {_MAX_TENSORS} are read.")
    except (OSError, SafetensorError) as error:
        raise _unreadable(name, error) from None
    entries = read_json(header.decode(), f"{name}: the header")
    dtypes = STORED_DTYPES | QUANTIZED_DTYPES
    tensors = {}
    for tensor in names:
        where, entry = f"{name}: tensor {_short(tensor)}", entries[tensor]
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise InvalidInput(where, "must have exactly dtype, shape and data_offsets")
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if len(shape) > _MAX_RANK:
            raise InvalidInput(where, f"has shape {list(shape)}", f"it must be up to {_MAX_RANK} sizes")
        tensors[tensor] = StoredTensor(shape, dtypes.get(dtype), 8 + length + entry["data_offsets"][0], dtype)
    return SafetensorsFile(path, tensors, stamp)


def read_tensor(file: SafetensorsFile, name: str) -> np.ndarray:
    """Returns one tensor as a view of the file, mapped into memory: the file is read when the view is read."""
    stored = file.tensors[name]
    dtype = checked_dtype(file, name)
    try:
        if _stamp(file.path) != file.stamp:
            raise InvalidInput(file.path.name, "was changed while it was read")
        if 0 in stored.shape:
            return np.zeros(stored.shape, dtype)
        return np.memmap(file.path, dtype, "r", stored.offset, stored.shape)
    except OSError as error:
        raise _unreadable(file.path.name, error) from None


def checked_dtype(file: SafetensorsFile, name: str) -> np.dtype:
    """Returns the type of a tensor's elements, one of `STORED_DTYPES` or `QUANTIZED_DTYPES`."""
    stored = file.tensors[name]
    if stored.dtype is None:
        known = ", ".join(STORED_DTYPES | QUANTIZED_DTYPES)
        text = f"tensor {_short(name)} has dtype {stored.code!r}; weights may be {known}."
        raise Unsupported(text).under(file.path.name)
    return stored.dtype


def _stamp(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _unreadable(name: str, error: OSError | SafetensorError) -> InvalidInput:
    if isinstance(error, OSError):
        return InvalidInput(name, f"cannot be read: {error.strerror or error}")
    return InvalidInput(name, f"is truncated or no safetensors file: {error}")


def _refuse_pickle(start: bytes, name: str) -> None:
    looks_like_header = start[8:9] == b"{"
    is_pickle = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    if not looks_like_header and (is_pickle or start.startswith(b"PK\x03\x04")):
        wanted = "reading one can run code. Convert it to safetensors"
        raise InvalidInput(name, "is a pickle, whatever its name says", wanted)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
