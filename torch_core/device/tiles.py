"""Loads of key and value tiles, paged or dense, that never follow a table entry or read a row outside a range."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Keys(NamedTuple):
    """Keys and values of one head of a cache, or of one sequence's dense rows."""

    key: Any  # key, value: pointers to the first key and value.
    value: Any
    key_scales: Any  # key_scales, value_scales: pointers to the scales per token of a quantised cache, or None.
    value_scales: Any


class KeyLayout(NamedTuple):
    """Sizes and strides in elements of keys and values, known when compiling."""

    HEAD_SIZE: Any  # HEAD_SIZE, VALUE_SIZE: elements of a key and of a value.
    HEAD_PADDED: Any  # HEAD_PADDED, VALUE_PADDED: the same as a power of two.
    VALUE_SIZE: Any
    VALUE_PADDED: Any
    # KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES: strides of (block, token, head); a dense array has no blocks.
    KEY_STRIDES: Any
    VALUE_STRIDES: Any
    SCALE_STRIDES: Any
    VALUE_OFFSET: Any  # Elements from a key row to its value row where both lie in one array, else 0.
    BLOCK_SIZE: Any  # Tokens of a block.
    PAGED: Any  # Keys lie in blocks.


@triton.jit
def readable(keys, low, high):
    """Which keys lie in [low, high); `low` is None where nothing is below it."""
    inside = keys < high
    if low is not None:
        inside = inside & (keys >= low)
    return inside


@triton.jit
def page_ids(block_table, keys, low, high, BLOCK_SIZE: tl.constexpr):
    """Block ids of the keys in [low, high); 0 for the others, whose table entries are not read."""
    return tl.load(block_table + block_of(keys, BLOCK_SIZE), mask=readable(keys, low, high), other=0)


@triton.jit
def block_of(keys, BLOCK_SIZE: tl.constexpr):
    """The column of the block table for each key. No key is negative, which spares the division its case for that."""
    return (keys.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)


@triton.jit
def offset_in_block(keys, BLOCK_SIZE: tl.constexpr):
    """The place of each key in its block; no key is negative."""
    return (keys.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)


@triton.jit
def key_rows(base, pages, position, columns, STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Pointers to the rows of the keys position + columns, from the base of a cache or of a sequence's dense rows.

    The block id is widened before it is multiplied: a pool may have more than 2^31 elements.
    """
    if PAGED:
        rows = base + (pages.to(tl.int64) * STRIDES[0] + offset_in_block(position + columns, BLOCK_SIZE) * STRIDES[1])
    else:
        rows = (base + tl.cast(position, tl.int64) * STRIDES[1]) + columns * STRIDES[1]
    return rows


@triton.jit
def load_tile(rows, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """The tile whose rows start at the pointers `rows`, padded to PADDED columns with 0.

    With MASKED, rows that are not `inside` are 0 and not read. That matters for values too: their weight is 0 there,
    but 0 * NaN of unwritten memory is NaN.
    """
    dims = tl.arange(0, PADDED)
    pointers = rows[:, None] + dims[None, :]
    if MASKED:
        if SIZE == PADDED:
            tile = tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
    elif SIZE == PADDED:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < SIZE)[None, :], other=0.0)
    return tile


@triton.jit
def token_head_scales(base, pages, keys, inside, STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The scale of each key's row in a cache quantised per token and head; 0 outside."""
    offsets = pages.to(tl.int64) * STRIDES[0] + offset_in_block(keys, BLOCK_SIZE) * STRIDES[1]
    return tl.load(base + offsets, mask=inside, other=0.0)
