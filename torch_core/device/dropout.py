"""Which softmax weights of a tile dropout leaves; generator and counters are those of torch_core.calls.dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Dropout", "dropout_of", "kept_weights"]


class Dropout(NamedTuple):
    """The seeds of rows, and what decides.

    Attributes:
        low, high: the two words of the seed: of each row, or of all.
        limit: a weight goes whose number is below it.
    """

    low: Any
    high: Any
    limit: Any


@triton.jit
def dropout_of(seeds, seq, heads, limit, STRIDES: tl.constexpr):
    """The Dropout of a sequence and of heads."""
    places = seeds + seq * STRIDES[0] + heads * STRIDES[1]
    return Dropout(tl.load(places), tl.load(places + 1), limit)


@triton.jit
def kept_weights(weights, query_pos, first_key, dropout, TRANSPOSED: tl.constexpr = False):
    """The weights [rows, keys] with 0 where dropout takes them; of keys from first_key on, a multiple of eight.

    With TRANSPOSED they are [keys, rows], and the seed is one for all rows.
    """
    KEYS: tl.constexpr = weights.shape[0] if TRANSPOSED else weights.shape[1]
    draws = first_key // 8 + tl.arange(0, KEYS // 8)
    if TRANSPOSED:
        counters, rows = draws[:, None], query_pos[None, :]
        low, high = dropout.low, dropout.high
    else:
        counters, rows = draws[None, :], query_pos[:, None]
        low, high = dropout.low[:, None], dropout.high[:, None]
    zeros = counters * 0 + rows * 0
    counters, rows, low, high = (
        _words(counters + zeros),
        _words(rows + zeros),
        _words(low + zeros),
        _words(high + zeros),
    )
    a, b, c, d = tl.philox_impl(counters, rows, _words(zeros), _words(zeros), low, high)
    # A bit for each of the eight keys of a draw: one number is spread out and not eight.
    bits = _kept_bits(a, dropout.limit, 0) | _kept_bits(b, dropout.limit, 2)
    bits |= _kept_bits(c, dropout.limit, 4) | _kept_bits(d, dropout.limit, 6)
    places = tl.arange(0, KEYS) % 8
    if TRANSPOSED:
        spread = tl.broadcast_to(bits[:, None, :], [KEYS // 8, 8, weights.shape[1]])
        kept = tl.reshape(spread, weights.shape) >> places[:, None]
    else:
        spread = tl.broadcast_to(bits[:, :, None], [weights.shape[0], KEYS // 8, 8])
        kept = tl.reshape(spread, weights.shape) >> places[None, :]
    return tl.where((kept & 1) != 0, weights, 0.0)


@triton.jit
def _words(numbers):
    return numbers.to(tl.uint32, bitcast=True)


@triton.jit
def _kept_bits(word, limit, FIRST: tl.constexpr):
    """The bits FIRST and FIRST + 1: whether the halves of a word reach the limit."""
    low = ((word & 0xFFFF).to(tl.int32) >= limit).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= limit).to(tl.int32)
    return (low << FIRST) | (high << (FIRST + 1))
