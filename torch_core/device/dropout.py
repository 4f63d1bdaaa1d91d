"""Which softmax weights of a tile dropout leaves; generator and counters are those of torch_core.calls.dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Dropout", "dropout_of", "kept_weights"]


class Dropout(NamedTuple):
    """The seed of a sequence and head, and what decides.

    Attributes:
        low, high: the two words of the seed.
        limit: a weight goes whose number is below it.
        first_query: of the tile, a row of the sequence; a multiple of 16.
    """

    low: Any
    high: Any
    limit: Any
    first_query: Any


@triton.jit
def dropout_of(seeds, seq, head, limit, first_query, STRIDES: tl.constexpr):
    """The Dropout of a sequence, a head and a tile of rows."""
    place = seeds + seq * STRIDES[0] + head * STRIDES[1]
    return Dropout(_words(tl.load(place)), _words(tl.load(place + 1)), limit, first_query)


@triton.jit
def kept_weights(weights, first_key, dropout, TRANSPOSED: tl.constexpr = False):
    """The weights [rows, keys] with 0 where dropout takes them; [keys, rows] with TRANSPOSED.

    `first_key` is a multiple of the tile's keys, of which there are 16 or a multiple of 32.

    A draw serves the weights of four keys and two rows that are 8 apart: those the matrix units leave in one thread's
    registers, so that no thread draws for another.
    """
    KEY_AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    KEYS: tl.constexpr = weights.shape[KEY_AXIS]
    ROWS: tl.constexpr = weights.shape[1 - KEY_AXIS]
    KEY_BLOCKS: tl.constexpr = max(1, KEYS // 32)
    key_draws = (first_key // 32 + tl.arange(0, KEY_BLOCKS)[:, None]) * 8 + tl.arange(0, 8)[None, :]
    row_draws = (dropout.first_query // 16 + tl.arange(0, ROWS // 16)[:, None]) * 8 + tl.arange(0, 8)[None, :]
    key_bits = (first_key + tl.arange(0, KEYS)) // 8 % 4
    row_bits = tl.arange(0, ROWS) // 8 % 2 * 4
    if TRANSPOSED:
        bits = _kept_bits(key_draws[:, :, None, None], row_draws[None, None, :, :], dropout)
        spread = tl.broadcast_to(
            bits[:, None, :, :, None, :], [KEY_BLOCKS, KEYS // KEY_BLOCKS // 8, 8, ROWS // 16, 2, 8]
        )
        bit = key_bits[:, None] + row_bits[None, :]
    else:
        bits = _kept_bits(key_draws[None, None, :, :], row_draws[:, :, None, None], dropout)
        spread = tl.broadcast_to(
            bits[:, None, :, :, None, :], [ROWS // 16, 2, 8, KEY_BLOCKS, KEYS // KEY_BLOCKS // 8, 8]
        )
        bit = row_bits[:, None] + key_bits[None, :]
    return tl.where((tl.reshape(spread, weights.shape) >> bit) & 1 != 0, weights, 0.0)


@triton.jit
def _kept_bits(key_draws, row_draws, dropout):
    """For each draw which of its eight weights stay: bit a + 4 * b for the keys 8 * a and the rows 8 * b further."""
    keys, rows = _words(key_draws), _words(row_draws)
    a, b, c, d = tl.philox_impl(keys, rows, keys * 0, rows * 0, dropout.low, dropout.high)
    bits = _halves(a, dropout.limit, 0) | _halves(b, dropout.limit, 1)
    return bits | _halves(c, dropout.limit, 2) | _halves(d, dropout.limit, 3)


@triton.jit
def _words(numbers):
    return numbers.to(tl.uint32, bitcast=True)


@triton.jit
def _halves(word, limit, KEY: tl.constexpr):
    low = ((word & 0xFFFF).to(tl.int32) >= limit).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= limit).to(tl.int32)
    return (low << KEY) | (high << (KEY + 4))
