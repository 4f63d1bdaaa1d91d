"""Reads a GGUF file's header defensively: every count, length, type and place is checked before it is used.

The format is ggml's (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jattn.llm.load.gguf.blocks import BLOCK_TYPES, UNREAD_TYPES
from jattn.llm.load.gguf.metadata import Metadata
from jattn.llm.load.tensor_file import StoredTensor, TensorFile, file_stamp, short_name
from torch_core.base.errors import InvalidInput, Unsupported

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_HEADER_BYTES = 64 << 20
_MAX_KEYS, _MAX_KEY_BYTES = 1 << 12, 1 << 10
_MAX_TENSORS, _MAX_NAME_BYTES, _MAX_RANK = 50_000, 127, 4
# All experts' tensors together.
_MAX_PARTS = 1 << 18
# A vocabulary and its merges; the texts of all lists together are read in less than a second.
_MAX_ELEMENTS, _MAX_TEXTS = 1 << 20, 1 << 21
_MAX_ALIGNMENT = 1 << 16
_TEXT, _LIST, _BOOL = 8, 9, 7
#: numpy's types of the format's numbers.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1"} | {
    10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
#: The tensors that hold all experts, of which each one becomes a tensor.
_EXPERTS = re.compile(r"(.+_exps)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The checked header of a GGUF file: its metadata and its tensors."""

    metadata: Metadata
    weights: TensorFile


def open_gguf(path: Path) -> GgufFile:
    """Reads and checks the header.

    A tensor `name_exps.weight` [experts, out, in] is listed as one tensor of each expert, `name_exps.0.weight` and so
    on.

    Raises:
        InvalidInput: it is no GGUF file, is truncated, or contradicts itself.
        Unsupported: another version, byte order or type of tensors; one of several files of a model.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput("the file", "is not a regular file")
        if status.st_size < 24:
            raise InvalidInput("the file", f"has {status.st_size} bytes", "a GGUF file has 24 at least")
        stamp = file_stamp(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _read(data)
    except OSError as error:
        raise InvalidInput(path.name, f"cannot be read: {error.strerror or error}") from None
    except (InvalidInput, Unsupported) as error:
        raise error.under(path.name) from None
    return GgufFile(metadata, TensorFile(path, tensors, stamp))


def _read(data: mmap.mmap) -> tuple[Metadata, dict[str, StoredTensor]]:
    if data[:4] != _MAGIC:
        raise InvalidInput("the file", f"begins with {data[:4]!r}", f"a GGUF file begins with {_MAGIC!r}")
    header = _Header(data)
    version = header.number(4)
    if version not in _VERSIONS:
        named = f"{version:#x}, as in a big-endian file" if version > 0xFFFF else str(version)
        raise Unsupported("version", f"is {named}", "this build reads 2 and 3, little-endian")
    num_tensors, num_keys = header.number(10), header.number(10)
    for name, count, most in (("tensor_count", num_tensors, _MAX_TENSORS), ("kv_count", num_keys, _MAX_KEYS)):
        if count > most:
            raise InvalidInput(name, value=count, wanted=f"at most {most} are read")
    metadata = Metadata()
    for _ in range(num_keys):
        key = header.text("a key", _MAX_KEY_BYTES)
        if key in metadata:
            raise InvalidInput(key, "is in the metadata twice")
        metadata[key] = header.value(key)
    if (parts := metadata.number("split.count", 1)) > 1:
        wanted = "join them with llama-gguf-split --merge"
        raise Unsupported("split.count", f"is {parts}: the model is in several files", wanted)
    entries = [_entry(header) for _ in range(num_tensors)]
    alignment = metadata.number("general.alignment", 32)
    if not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        wanted = f"it must be a power of two up to {_MAX_ALIGNMENT}"
        raise InvalidInput("general.alignment", value=alignment, wanted=wanted)
    return metadata, _placed(entries, -(-header.at // alignment) * alignment, alignment, len(data))


class _Header:
    """Takes values one after the other from the beginning of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at, self._end = data, 4, min(len(data), _MAX_HEADER_BYTES)
        self._whole, self._num_texts = len(data) <= _MAX_HEADER_BYTES, 0

    def number(self, kind: int) -> Any:
        code = _NUMBERS[kind]
        return np.frombuffer(self._take(np.dtype(code).itemsize), code)[0].item()

    def text(self, name: str, longest: int = _MAX_HEADER_BYTES) -> str:
        size = self.number(10)
        if size > longest:
            raise InvalidInput(name, f"has {size} bytes", f"at most {longest} are read")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(name, f"is not UTF-8 text (byte {error.start})") from None

    def value(self, key: str) -> Any:
        kind = self.number(4)
        if kind == _LIST:
            return self._list(key)
        if kind == _TEXT:
            return self.text(key)
        if kind not in _NUMBERS:
            raise InvalidInput(key, f"has the type {kind}", "the format has 0 to 12")
        return self._checked(key, kind, self.number(kind))

    def _list(self, key: str) -> Any:
        kind, count = self.number(4), self.number(10)
        if count > _MAX_ELEMENTS:
            raise InvalidInput(key, f"has {count} elements", f"at most {_MAX_ELEMENTS} are read")
        if kind == _TEXT:
            return self._texts(key, count)
        if kind not in _NUMBERS:
            raise InvalidInput(key, f"is a list of type {kind}", "lists of numbers and texts are read")
        code = np.dtype(_NUMBERS[kind])
        return self._checked(key, kind, np.frombuffer(self._take(count * code.itemsize), code))

    def _texts(self, key: str, count: int) -> list[str]:
        # Inline: this is most of the time that a header takes.
        data, at, end, unpack = self._data, self.at, self._end, struct.Struct("<Q").unpack_from
        self._num_texts += count
        if self._num_texts > _MAX_TEXTS:
            raise InvalidInput(key, "has too many elements", f"{_MAX_TEXTS} texts are read in all")
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + (unpack(data, at)[0] if start <= end else end)
                if at > end:
                    raise self._truncated(at)
                found.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            name = f"{key}[{len(found)}]"
            raise InvalidInput(name, f"is not UTF-8 text (byte {error.start})") from None
        self.at = at
        return found

    def _checked(self, key: str, kind: int, value: Any) -> Any:
        if kind != _BOOL:
            return value
        if np.any(np.asarray(value) > 1):
            raise InvalidInput(key, value=value, wanted="the bytes of booleans are 0 and 1")
        return bool(value) if isinstance(value, int) else value.astype(bool)

    def _take(self, size: int) -> bytes:
        if size > self._end - self.at:
            raise self._truncated(self.at + size)
        self.at += size
        return self._data[self.at - size : self.at]

    def _truncated(self, wanted: int) -> InvalidInput:
        if self._whole:
            return InvalidInput("the file", f"is truncated: its header needs byte {wanted}")
        return InvalidInput("the header", f"is longer than {_MAX_HEADER_BYTES} bytes", "no more are read")


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Returns the name, the shape, the type and the offset of a tensor."""
    name = header.text("a tensor's name", _MAX_NAME_BYTES)
    where, rank = f"tensor {short_name(name)}", header.number(4)
    if not 1 <= rank <= _MAX_RANK:
        raise InvalidInput(where, f"has {rank} dimensions", f"it must have 1 to {_MAX_RANK}")
    # The file has the fastest dimension first.
    shape = tuple(header.number(10) for _ in range(rank))[::-1]
    if min(shape) < 1 or math.prod(shape) >= 1 << 63:
        raise InvalidInput(where, f"has shape {list(shape)}", "sizes are at least 1, and fewer than 2^63 elements")
    kind, offset = header.number(4), header.number(10)
    if kind not in BLOCK_TYPES:
        known = ", ".join(each.name for each in BLOCK_TYPES.values())
        raise Unsupported(where, f"has type {UNREAD_TYPES.get(kind, kind)}", f"this build reads {known}")
    if shape[-1] % BLOCK_TYPES[kind].size:
        wanted = f"rows of {BLOCK_TYPES[kind].name} are multiples of {BLOCK_TYPES[kind].size}"
        raise InvalidInput(where, f"has shape {list(shape)}", wanted)
    return name, shape, kind, offset


def _placed(
    entries: list[tuple[str, tuple[int, ...], int, int]], first: int, alignment: int, end: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    last_end, last_name = first, ""
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        where, start = f"tensor {short_name(name)}", first + offset
        size = BLOCK_TYPES[kind].num_bytes(math.prod(shape))
        if offset % alignment:
            raise InvalidInput(where, f"has offset {offset}", f"it must be a multiple of {alignment}")
        if start + size > end:
            raise InvalidInput(where, f"ends at byte {start + size}, and the file has {end}", "it is truncated")
        if start < last_end:
            raise InvalidInput(where, f"overlaps tensor {short_name(last_name)}")
        for part, stored in _parts(name, shape, kind, start):
            if part in tensors:
                raise InvalidInput(f"tensor {short_name(part)}", "is in the file twice")
            tensors[part] = stored
        if len(tensors) > _MAX_PARTS:
            raise InvalidInput(where, "has too many experts", f"{_MAX_PARTS} tensors are read in all")
        last_end, last_name = start + size, name
    return tensors


def _parts(name: str, shape: tuple[int, ...], kind: int, start: int) -> list[tuple[str, StoredTensor]]:
    """Returns the tensor, or that of each expert."""
    block = BLOCK_TYPES[kind]
    experts = _EXPERTS.fullmatch(name)
    if experts is None or len(shape) == 1:
        return [(name, _stored(block, shape, start))]
    if shape[0] > _MAX_PARTS:
        raise InvalidInput(f"tensor {short_name(name)}", f"has {shape[0]} experts", f"at most {_MAX_PARTS} are read")
    size = block.num_bytes(math.prod(shape[1:]))
    return [
        (f"{experts[1]}.{index}.{experts[2]}", _stored(block, shape[1:], start + index * size))
        for index in range(shape[0])
    ]


def _stored(block: Any, shape: tuple[int, ...], start: int) -> StoredTensor:
    if block.values is None:
        return StoredTensor(shape, block.layout, start, block.name)
    size = block.num_bytes(math.prod(shape))
    return StoredTensor(shape, np.dtype(np.float32), start, block.name, size, block.unpack)
