"""What the inline assembly of the kernels is meant to compute, by what stands in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.emulated.values import DTYPES, Tensor

__all__ = ["emulated_assembly"]

_WARP_ROWS = 16
# The sums beyond which the Hopper softmax moves its reference, to where the largest weight is 2 to this power: of
# 16-bit weights and of e4m3.
_MOVES = {False: (2.0**10, 0.0), True: (448.0, 4.0)}
_E4M3 = DTYPES["float8e4nv"].numpy


def emulated_assembly(asm: str, args: list[np.ndarray]) -> Any:
    """Computes what a piece of assembly without barriers and memory would.

    Raises:
        NotImplementedError: nothing here knows it.
    """
    dtype = (DTYPES["bfloat16"] if "bf16x2" in asm else DTYPES["float16"]).numpy
    with np.errstate(all="ignore"):
        if asm == "mov.b32 {$0, $1}, $2;":
            low, high = np.moveaxis(_halves(args[0], np.dtype(np.int16)), -1, 0)
            return Tensor(low), Tensor(high)
        if "setp.neu.f32 moved" in asm:
            # A warp without a row that moved leaves its rows: all their factors are 1.
            return Tensor(args[0] * args[1])
        if "prmt.b32 word" in asm:
            return _unpacked_codes(*args)
        if "max.f32" in asm:
            return _softmax_step(*args, first="settled" not in asm, dtype=_E4M3 if "e4m3x2" in asm else dtype)
        if asm == "prmt.b32 $0, $1, 0, 0x1032;":
            # Each word stands there four times, once for each of its bytes.
            words = _bytes(args[0][..., ::4])
            return Tensor(words[..., [2, 3, 0, 1]].reshape(args[0].shape).view(np.int8))
        if asm.count("prmt.b32") == 8:
            columns = np.stack([_bytes(x) for x in args], -1)
            return tuple(Tensor(_words(columns[..., i, :])) for i in range(4))
        if "ex2.approx" in asm:
            return Tensor(_packed(np.stack([np.exp2(x) for x in args], -1), dtype))
        if "mul.f32" in asm:
            weights = _halves(args[0], dtype).astype(np.float32)
            return Tensor(_packed(weights * np.stack(args[1:], -1), dtype))
    raise NotImplementedError(f"inline assembly that the emulator does not know: {asm}")


def _unpacked_codes(codes: np.ndarray, *scale: np.ndarray) -> tuple[Tensor, Tensor]:
    """Words of bfloat16 from words of e4m3, times a scale that is the sum of two numbers; rounded once."""
    dtype = DTYPES["bfloat16"].numpy
    values = _bytes(codes).view(_E4M3).astype(np.float32)
    if scale:
        values = values * sum(_halves(part, dtype)[..., :1].astype(np.float32) for part in scale)
    return Tensor(_packed(values[..., :2], dtype)), Tensor(_packed(values[..., 2:], dtype))


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)


def _words(groups: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(groups).view(np.int32)[..., 0]


def _halves(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(words).view(dtype).reshape(*words.shape, 2)


def _packed(pairs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(pairs.astype(dtype)).view(np.int32)[..., 0]


def _softmax_step(scores: np.ndarray, state: np.ndarray, *, first: bool, dtype: np.dtype) -> tuple[Tensor, Tensor]:
    """One step of `torch_core.device.hopper_softmax`, with the weights of either prefill kernel.

    A thread has the places [row, block of 8 columns, :, bit].
    """
    limit, height = (np.float32(x) for x in _MOVES[dtype == _E4M3])
    rows, columns = scores.shape
    # Axes: row, thread of the row, the thread's elements in the order of their columns.
    s, old = (x.reshape(rows, columns // 8, 4, 2).transpose(0, 2, 1, 3).reshape(rows, 4, -1) for x in (scores, state))
    scale, reference, totals = old[:1, :1, 6], old[:, :, 0], old[:, :, 4:6]
    top = s.max((1, 2), keepdims=True)[..., 0] * scale
    factor, moved = np.ones((rows, 4), np.float32), np.zeros((rows, 4), np.float32)
    if first:
        # What the state holds there before the first tile is how high e4m3 weights begin.
        reference = np.broadcast_to(top - (reference if dtype == _E4M3 else 0), (rows, 4))
        weights, sums = _weights(s, scale, reference)
        totals = sums
    else:
        weights, sums = _weights(s, scale, reference, first_seen=True)
        largest = sums.max((1, 2))
        beyond = ~(largest <= limit)
        warps = beyond.reshape(-1, _WARP_ROWS).any(1).repeat(_WARP_ROWS)[:, None]
        moves = (beyond[:, None] & warps).repeat(4, 1)
        factor = np.where(moves & (reference > -np.inf), np.exp2(reference - (top - height)), 1).astype(np.float32)
        reference = np.where(moves, top - height, reference)
        again, sums_again = _weights(s, scale, reference)
        weights = np.where(warps[..., None], again, weights)
        sums = np.where(warps[..., None], sums_again, sums)
        moved = np.where(warps, 1, moved).astype(np.float32)
        totals = totals * factor[..., None] + sums
    new = np.full_like(old, np.nan)
    new[..., 0], new[..., 2], new[..., 3], new[..., 4:6], new[..., 6] = reference, factor, moved, totals, scale
    places = np.full((rows, columns // 8, 4, 2), -1, np.int32)
    if dtype == _E4M3:
        # Four blocks' weights of one column are a word, the later two in its lower half.
        quads = weights.reshape(rows, 4, -1, 4, 2).transpose(0, 2, 1, 4, 3)[..., [2, 3, 0, 1]]
        places[:, : columns // 32] = _words(np.minimum(quads, 448).astype(dtype))
    else:
        # The pairs of two blocks of 8 columns lie in one, in the first half of the columns.
        pairs = _packed(weights.reshape(rows, 4, -1, 2), dtype)
        places[:, : columns // 16] = pairs.reshape(rows, 4, -1, 2).transpose(0, 2, 1, 3)
    after = new.reshape(rows, 4, -1, 2).transpose(0, 2, 1, 3).reshape(rows, columns)
    return Tensor(places.reshape(rows, columns)), Tensor(after.astype(np.float32))


def _weights(
    s: np.ndarray, scale: np.ndarray, reference: np.ndarray, *, first_seen: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and each thread's sums of those in even and odd columns; without a key yet, a row is shifted by 0.

    With `first_seen` such a row has weights that are infinite or NaN, which send it the long way.
    """
    shift = reference if first_seen else np.where(reference > -np.inf, reference, np.float32(0))
    weights = np.exp2(s * scale[..., None] - shift[..., None])
    return weights, weights.reshape(*s.shape[:2], -1, 2).sum(2)
