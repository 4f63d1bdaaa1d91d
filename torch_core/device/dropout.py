"""Dropout of the softmax weights of a tile, with the generator and counters of torch_core.attention.dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """The seed of a sequence and head, and the threshold."""

    low: Any  # low, high: the two words of the seed.
    high: Any
    limit: Any  # A weight whose number is below it becomes 0.
    first_query: Any  # The first row of the tile in the sequence; a multiple of 16.


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
    registers, so that no thread draws for another. Which word and half is a weight's is known of each register when
    compiling, and costs nothing.
    """
    KEY_AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    KEYS: tl.constexpr = weights.shape[KEY_AXIS]
    ROWS: tl.constexpr = weights.shape[1 - KEY_AXIS]
    KEY_BLOCKS: tl.constexpr = max(1, KEYS // 32)
    key_draws = (first_key // 32 + tl.arange(0, KEY_BLOCKS)[:, None]) * 8 + tl.arange(0, 8)[None, :]
    row_draws = (dropout.first_query // 16 + tl.arange(0, ROWS // 16)[:, None]) * 8 + tl.arange(0, 8)[None, :]
    key_word = tl.arange(0, KEYS) // 8 % 4
    if KEYS < 32:
        key_word += first_key // 8 % 4
    row_half = tl.arange(0, ROWS) // 8 % 2
    if TRANSPOSED:
        key_draws, row_draws = key_draws[:, :, None, None], row_draws[None, None, :, :]
        key_word, row_half = key_word[:, None], row_half[None, :]
    else:
        key_draws, row_draws = key_draws[None, None, :, :], row_draws[:, :, None, None]
        key_word, row_half = key_word[None, :], row_half[:, None]
    a, b, c, d = _draw(key_draws, row_draws, dropout)
    a, b = _spread(a, KEYS, ROWS, TRANSPOSED), _spread(b, KEYS, ROWS, TRANSPOSED)
    c, d = _spread(c, KEYS, ROWS, TRANSPOSED), _spread(d, KEYS, ROWS, TRANSPOSED)
    word = tl.where(key_word < 2, tl.where(key_word == 0, a, b), tl.where(key_word == 2, c, d))
    # The deciding half is in the high bits: the low bits change no comparison with a limit of 16 bits.
    number = tl.where(row_half == 0, word << 16, word)
    return tl.where(number >= tl.cast(dropout.limit, tl.uint32) << 16, weights, 0.0)


@triton.jit
def _spread(draws, KEYS: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A word of each draw, [blocks, 8, blocks, 8], for all weights that it serves."""
    KEY_BLOCKS: tl.constexpr = max(1, KEYS // 32)
    KEY_PARTS: tl.constexpr = KEYS // KEY_BLOCKS // 8
    if TRANSPOSED:
        draws = tl.broadcast_to(draws[:, None, :, :, None, :], [KEY_BLOCKS, KEY_PARTS, 8, ROWS // 16, 2, 8])
        draws = tl.reshape(draws, [KEYS, ROWS])
    else:
        draws = tl.broadcast_to(draws[:, None, :, :, None, :], [ROWS // 16, 2, 8, KEY_BLOCKS, KEY_PARTS, 8])
        draws = tl.reshape(draws, [ROWS, KEYS])
    return draws


@triton.jit
def _draw(key_draws, row_draws, dropout):
    """The four words of each draw, as `tl.philox_impl` has them: there a product takes two instructions, here one."""
    a, b = tl.broadcast(_words(key_draws), _words(row_draws))
    c, d = a ^ a, a ^ a
    low, high = dropout.low, dropout.high
    for _ in tl.static_range(7):
        of_a, of_c = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b = (of_c >> 32).to(tl.uint32) ^ b ^ low, of_c.to(tl.uint32)
        c, d = (of_a >> 32).to(tl.uint32) ^ d ^ high, of_a.to(tl.uint32)
        low += tl.full([], 0x9E3779B9, tl.uint32)
        high += tl.full([], 0xBB67AE85, tl.uint32)
    return a, b, c, d


@triton.jit
def _words(numbers):
    return numbers.to(tl.uint32, bitcast=True)
