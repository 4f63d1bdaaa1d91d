"""Reads one safetensors file defensively: the header is checked whole before a tensor is allocated.

The format (github.com/huggingface/safetensors, README): an unsigned 64-bit little-endian header length, a JSON
header with dtype, shape and byte range of each tensor, then the bytes. We read it ourselves because the limits of
the library (a 100 MB header, no cap on entries) are wider than ours; writing goes through the library.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jattn.load.folder import read_json
from torch_core.errors import InvalidInput, Unsupported

__all__ = ["STORED_DTYPES", "SafetensorsFile", "StoredTensor", "open_safetensors", "read_tensor"]

_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 50_000
_MAX_RANK = 8
#: The floating-point types that weights may be stored in.
STORED_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in its file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The checked header of one file; the file itself is not kept open."""

    path: Path
    tensors: dict[str, StoredTensor]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Reads and checks the header.

    Raises:
        InvalidInput: not a safetensors file, truncated, or with a header that breaks a rule of the format.
        Unsupported: a tensor of a type that is not in `STORED_DTYPES`.
    """
    name = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(9)
            _refuse_pickle(start, name)
            if len(start) < 9:
                raise InvalidInput(f"{name} has {size} bytes; a safetensors file has at least 10.")
            (length,) = struct.unpack("<Q", start[:8])
            if length > _MAX_HEADER_BYTES:
                raise InvalidInput(f"{name}: the header length is {length}; at most {_MAX_HEADER_BYTES} are read.")
            if 8 + length > size:
                raise InvalidInput(f"{name} is truncated: the header ends at byte {8 + length} of {size}.")
            header = start[8:] + file.read(length - 1)
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}.") from None
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}: the header is not UTF-8 text (byte {8 + error.start}).") from None
    entries = read_json(text, f"{name}: the header")
    entries.pop("__metadata__", None)
    if len(entries) > _MAX_TENSORS:
        raise InvalidInput(f"{name}: the header lists {len(entries)} tensors; at most {_MAX_TENSORS} are read.")
    return SafetensorsFile(path, _check_entries(entries, 8 + length, size, name))


def read_tensor(file: SafetensorsFile, name: str) -> np.ndarray:
    """Returns one tensor as a new array.

    Raises:
        InvalidInput: the file became shorter since its header was checked, or cannot be read.
    """
    stored = file.tensors[name]
    data = np.empty(stored.shape, stored.dtype)
    try:
        with file.path.open("rb") as source:
            source.seek(stored.offset)
            read = source.readinto(data.reshape(-1).view(np.uint8).data) if data.size else 0
    except OSError as error:
        raise InvalidInput(f"{file.path.name} cannot be read: {error.strerror}.") from None
    if read != data.nbytes:
        raise InvalidInput(f"{file.path.name} is truncated: tensor {name!r} has {read} of {data.nbytes} bytes.")
    return data


def _refuse_pickle(start: bytes, name: str) -> None:
    looks_like_header = start[8:9] == b"{"
    is_pickle = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    if not looks_like_header and (is_pickle or start.startswith(b"PK\x03\x04")):
        raise InvalidInput(
            f"{name} is a pickle, whatever its name says; reading one can run code. Convert it to safetensors."
        )


def _check_entries(entries: dict[str, Any], start: int, size: int, file_name: str) -> dict[str, StoredTensor]:
    tensors, ranges = {}, []
    for name, entry in entries.items():
        where = f"{file_name}: tensor {_short(name)}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise InvalidInput(f"{where} must have exactly dtype, shape and data_offsets.")
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
            raise Unsupported(f"{where} has dtype {_short(dtype)}; weights may be {', '.join(STORED_DTYPES)}.")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _is_sizes(shape) or len(shape) > _MAX_RANK:
            raise InvalidInput(f"{where} has shape {_short(shape)}; it must be up to {_MAX_RANK} sizes.")
        if not _is_sizes(offsets) or len(offsets) != 2:
            raise InvalidInput(f"{where} has data_offsets {_short(offsets)}; they must be two byte positions.")
        begin, end = offsets
        nbytes = math.prod(shape) * STORED_DTYPES[dtype].itemsize
        if end - begin != nbytes:
            raise InvalidInput(f"{where} has {end - begin} bytes for shape {_short(shape)} of {dtype}, not {nbytes}.")
        tensors[name] = StoredTensor(name, STORED_DTYPES[dtype], tuple(shape), start + begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            kind = "overlaps another" if begin < position else "leaves a gap before it"
            raise InvalidInput(f"{file_name}: tensor {_short(name)} starts at {begin}, not {position}; it {kind}.")
        position = end
    if start + position != size:
        state = "truncated" if start + position > size else "longer than its header says"
        raise InvalidInput(f"{file_name} is {state}: it should have {start + position} bytes and has {size}.")
    return tensors


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
