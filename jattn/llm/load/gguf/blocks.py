"""Types of tensors in GGUF files: blocks of numbers in few bits with scales, and their values in float32.

The formats and the order of float32 operations are ggml's (github.com/ggml-org/ggml, src/ggml-quants.c), so that values
equal its own bit by bit. In a format, d and dmin are the scale and the minimum of a block, and the "K" types have 6-bit
(or 4-bit) scales of parts of a block too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from torch_core.base.errors import InvalidInput

# Elements that one call converts: they fit a processor's cache.
_AT_ONCE = 1 << 18
_THREADS = 8
_SCALES_OF_BLOCKS = ("d", "m", "dmin")


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF.

    Attributes:
        name: ggml's name.
        size: elements of a block.
        layout: dtype of a block: of its fields, or of its one element.
        values: float32[blocks, size] of blocks; None if elements are stored as they are.
    """

    name: str
    size: int
    layout: np.dtype
    values: Callable[[np.ndarray], np.ndarray] | None = None

    def num_bytes(self, num_elements: int) -> int:
        """Returns the bytes of whole blocks."""
        return num_elements // self.size * self.layout.itemsize

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Returns the elements of uint8[bytes]: float32, or the type that they are stored in.

        Raises:
            InvalidInput: a scale or a minimum is not finite.
        """
        blocks = packed.view(self.layout)
        if self.values is None:
            return blocks
        for name in set(_SCALES_OF_BLOCKS) & set(self.layout.names or ()):
            if not (is_finite := np.isfinite(blocks[name])).all():
                wanted = "a scale is a number"
                raise InvalidInput(name, f"of block {is_finite.argmin()} is NaN or infinite", wanted)
        values, step = self.values, _AT_ONCE // self.size
        found = np.empty((len(blocks), self.size), np.float32)

        def convert(start: int) -> None:
            found[start : start + step] = values(blocks[start : start + step])

        starts = range(0, len(blocks), step)
        if len(starts) > 1:
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(convert, starts))
        else:
            list(map(convert, starts))
        return found.reshape(-1)


def _wide(value: np.ndarray) -> np.ndarray:
    """Returns a number of each block as float32[blocks, 1]."""
    return value.astype(np.float32)[:, None]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the lower four bits of each byte along the last axis, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _shifted(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns uint8[..., 8 / bits, n] of uint8[..., n]: the lowest bits of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & ((1 << bits) - 1)


def _fifth_bits(blocks: Any) -> np.ndarray:
    """Returns the fifth bit of each of 32 numbers, in its place."""
    return np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4


def _q4_0(blocks: Any) -> np.ndarray:
    return _wide(blocks["d"]) * (_nibbles(blocks["qs"]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Any) -> np.ndarray:
    return _wide(blocks["d"]) * _nibbles(blocks["qs"]).astype(np.float32) + _wide(blocks["m"])


def _q5_0(blocks: Any) -> np.ndarray:
    numbers = (_nibbles(blocks["qs"]) | _fifth_bits(blocks)).astype(np.float32)
    return _wide(blocks["d"]) * (numbers - np.float32(16))


def _q5_1(blocks: Any) -> np.ndarray:
    numbers = (_nibbles(blocks["qs"]) | _fifth_bits(blocks)).astype(np.float32)
    return _wide(blocks["d"]) * numbers + _wide(blocks["m"])


def _q8_0(blocks: Any) -> np.ndarray:
    return _wide(blocks["d"]) * blocks["qs"].astype(np.float32)


def _scaled(scale: np.ndarray, numbers: np.ndarray, minimum: np.ndarray | None = None) -> np.ndarray:
    """Returns parts [blocks, parts, n] times their scales, less their minimums, as [blocks, 256]."""
    found = scale[..., None] * numbers.reshape(*scale.shape, -1).astype(np.float32)
    return (found if minimum is None else found - minimum[..., None]).reshape(len(scale), -1)


def _six_bit_scales(blocks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the minimums of the eight parts of a block of Q4_K or Q5_K, float32[blocks, 8]."""
    scales, minimums, rest = np.split(blocks["scales"], 3, -1)
    scale = np.concatenate([scales & 63, (rest & 15) | (scales >> 6 << 4)], -1)
    minimum = np.concatenate([minimums & 63, (rest >> 4) | (minimums >> 6 << 4)], -1)
    return _wide(blocks["d"]) * scale.astype(np.float32), _wide(blocks["dmin"]) * minimum.astype(np.float32)


def _q2_k(blocks: Any) -> np.ndarray:
    scale = _wide(blocks["d"]) * (blocks["scales"] & 15).astype(np.float32)
    minimum = _wide(blocks["dmin"]) * (blocks["scales"] >> 4).astype(np.float32)
    return _scaled(scale, _shifted(blocks["qs"], 2), minimum)


def _q3_k(blocks: Any) -> np.ndarray:
    low, high = blocks["scales"][:, :8], blocks["scales"][:, 8:]
    scales = (_nibbles(low) | _shifted(high, 2).reshape(-1, 16) << 4).astype(np.float32) - np.float32(32)
    # A number whose bit is not set is less by four.
    numbers = _shifted(blocks["qs"], 2).reshape(-1, 8, 32) + _shifted(blocks["hmask"], 1) * np.uint8(4)
    return _scaled(_wide(blocks["d"]) * scales, numbers.astype(np.float32) - np.float32(4))


def _q4_k(blocks: Any) -> np.ndarray:
    scale, minimum = _six_bit_scales(blocks)
    return _scaled(scale, _shifted(blocks["qs"], 4), minimum)


def _q5_k(blocks: Any) -> np.ndarray:
    scale, minimum = _six_bit_scales(blocks)
    numbers = _shifted(blocks["qs"], 4).reshape(-1, 8, 32) | _shifted(blocks["qh"], 1) << 4
    return _scaled(scale, numbers, minimum)


def _q6_k(blocks: Any) -> np.ndarray:
    numbers = _shifted(blocks["ql"], 4).reshape(-1, 8, 32) | _shifted(blocks["qh"], 2).reshape(-1, 8, 32) << 4
    scale = _wide(blocks["d"]) * blocks["scales"].astype(np.float32)
    return _scaled(scale, numbers.astype(np.float32) - np.float32(32))


def _packed(name: str, size: int, values: Callable[[Any], np.ndarray], *fields: tuple[Any, ...]) -> BlockType:
    return BlockType(name, size, np.dtype(list(fields)), values)


_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
_SCALES = ("scales", "u1", (12,))
#: The types that are read, by ggml's number.
BLOCK_TYPES = {
    0: BlockType("F32", 1, np.dtype("<f4")),
    1: BlockType("F16", 1, np.dtype("<f2")),
    2: _packed("Q4_0", 32, _q4_0, _D, ("qs", "u1", (16,))),
    3: _packed("Q4_1", 32, _q4_1, _D, _M, ("qs", "u1", (16,))),
    6: _packed("Q5_0", 32, _q5_0, _D, ("qh", "u1", (4,)), ("qs", "u1", (16,))),
    7: _packed("Q5_1", 32, _q5_1, _D, _M, ("qh", "u1", (4,)), ("qs", "u1", (16,))),
    8: _packed("Q8_0", 32, _q8_0, _D, ("qs", "i1", (32,))),
    10: _packed("Q2_K", 256, _q2_k, ("scales", "u1", (16,)), ("qs", "u1", (2, 32)), _D, _DMIN),
    11: _packed("Q3_K", 256, _q3_k, ("hmask", "u1", (32,)), ("qs", "u1", (2, 32)), _SCALES, _D),
    12: _packed("Q4_K", 256, _q4_k, _D, _DMIN, _SCALES, ("qs", "u1", (4, 32))),
    13: _packed("Q5_K", 256, _q5_k, _D, _DMIN, _SCALES, ("qh", "u1", (32,)), ("qs", "u1", (4, 32))),
    14: _packed("Q6_K", 256, _q6_k, ("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", (16,)), _D),
    30: BlockType("BF16", 1, np.dtype(ml_dtypes.bfloat16)),
}
#: ggml's names of types that are not read, for errors.
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
