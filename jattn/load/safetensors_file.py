"""Reads one safetensors file defensively: size, kind and header are checked before a tensor is allocated.

The rules of the format (github.com/huggingface/safetensors, README) are the library's to check: types, shapes, byte
ranges that follow each other and cover the file. Around it stand limits that are narrower than its own (a header of
100 MB, no cap on entries), a word on pickles, and the two things it lets pass: a name that is there twice, and fields
that the format does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jattn.load.folder import read_json
from torch_core.errors import InvalidInput, Unsupported

__all__ = ["STORED_DTYPES", "SafetensorsFile", "open_safetensors", "read_tensor"]

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
class SafetensorsFile:
    """The checked header of one file, which is not kept open.

    Attributes:
        path: of the file.
        shapes: of every tensor in it.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Reads and checks the header.

    Raises:
        InvalidInput: not a safetensors file, truncated, or with a header that breaks a rule of the format.
        Unsupported: a tensor of a type that is not in `STORED_DTYPES`.
    """
    name = path.name
    try:
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
            stored = {tensor: file.get_slice(tensor) for tensor in names}
            found = {tensor: (view.get_dtype(), tuple(view.get_shape())) for tensor, view in stored.items()}
    except (OSError, SafetensorError) as error:
        raise _unreadable(name, error) from None
    entries = read_json(header.decode(), f"{name}: the header")
    for tensor, (dtype, shape) in found.items():
        where = f"{name}: tensor {_short(tensor)}"
        if set(entries[tensor]) != {"dtype", "shape", "data_offsets"}:
            raise InvalidInput(f"{where} must have exactly dtype, shape and data_offsets.")
        if dtype not in STORED_DTYPES:
            raise Unsupported(f"{where} has dtype {dtype!r}; weights may be {', '.join(STORED_DTYPES)}.")
        if len(shape) > _MAX_RANK:
            raise InvalidInput(f"{where} has shape {list(shape)}; it must be up to {_MAX_RANK} sizes.")
    return SafetensorsFile(path, {tensor: shape for tensor, (_, shape) in found.items()})


def read_tensor(file: SafetensorsFile, name: str) -> np.ndarray:
    """Returns one tensor as a new array.

    Raises:
        InvalidInput: the file changed since its header was checked, or cannot be read.
    """
    try:
        with safe_open(file.path, framework="numpy") as opened:
            tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _unreadable(file.path.name, error) from None
    if tensor.shape != file.shapes[name]:
        raise InvalidInput(f"{file.path.name} was replaced while it was read: tensor {name!r} has another shape.")
    return tensor


def _unreadable(name: str, error: OSError | SafetensorError) -> InvalidInput:
    if isinstance(error, OSError):
        return InvalidInput(f"{name} cannot be read: {error.strerror or error}.")
    return InvalidInput(f"{name} is truncated or no safetensors file: {error}.")


def _refuse_pickle(start: bytes, name: str) -> None:
    looks_like_header = start[8:9] == b"{"
    is_pickle = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    if not looks_like_header and (is_pickle or start.startswith(b"PK\x03\x04")):
        raise InvalidInput(
            f"{name} is a pickle, whatever its name says; reading one can run code. Convert it to safetensors."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
