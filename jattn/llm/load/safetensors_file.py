"""Reads one safetensors file defensively: size, kind and header are checked before a tensor is touched.

The rules of the format (github.com/huggingface/safetensors, README) are the library's to check: types, shapes, byte
ranges that follow each other and cover the file. Around it are limits that are narrower than its own (a header of
100 MB, no cap on entries), a word on pickles, and the two things it lets pass: a name that is there twice, and fields
that the format does not have.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from jattn.llm.load.folder import read_json
from jattn.llm.load.tensor_file import QUANTIZED_DTYPES, STORED_DTYPES, StoredTensor, TensorFile, file_stamp, short_name
from torch_core.base.errors import InvalidInput

_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 50_000
_MAX_RANK = 8


def open_safetensors(path: Path) -> TensorFile:
    """Reads and checks the header."""
    name = path.name
    try:
        stamp = file_stamp(path)
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
        where, entry = f"{name}: tensor {short_name(tensor)}", entries[tensor]
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise InvalidInput(where, "must have exactly dtype, shape and data_offsets")
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if len(shape) > _MAX_RANK:
            raise InvalidInput(where, f"has shape {list(shape)}", f"it must be up to {_MAX_RANK} sizes")
        tensors[tensor] = StoredTensor(shape, dtypes.get(dtype), 8 + length + entry["data_offsets"][0], dtype)
    return TensorFile(path, tensors, stamp)


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
