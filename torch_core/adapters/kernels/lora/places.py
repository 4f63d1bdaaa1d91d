"""Tiles of rows that have one slot: found by each program, or by a launch before, for all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lora_tiles_kernel(
    start_loc,
    table,
    num_groups,
    num_rows,
    num_tiles,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Writes slot, first place and the slot's end of each tile, for `tile_rows`. Grid: (1,)."""
    starts, ends, tiles = _slots(start_loc, num_groups, num_rows, BLOCK_S, BLOCK_M, OTHERS)
    end_tiles = tl.cumsum(tiles, 0)
    first_tiles = end_tiles - tiles
    for index in range(tl.max(tiles, 0)):
        own, is_tile = table + (first_tiles + index) * 4, index < tiles
        tl.store(own, tl.arange(0, BLOCK_S), mask=is_tile)
        tl.store(own + 1, starts + index * BLOCK_M, mask=is_tile)
        tl.store(own + 2, ends, mask=is_tile)
    for first in range(tl.max(end_tiles, 0), num_tiles, BLOCK_S):
        behind = first + tl.arange(0, BLOCK_S)
        for place in tl.static_range(3):
            tl.store(table + behind * 4 + place, num_groups if place == 0 else 0, mask=behind < num_tiles)


@triton.jit
def tile_rows(
    start_loc,
    token_indices,
    tile,
    num_groups,
    num_rows,
    ENTRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OTHERS: tl.constexpr = False,
):
    """The slot of a tile of rows, num_groups or more for none; places in the order of slots, their rows, the live ones.

    With OTHERS, the last group's rows are those without an adapter. A place that is not live is the tile's first one:
    no row depends on another, and its result is not stored. If ENTRY is not 0, `start_loc` is a table with as many
    numbers for each tile, with its rows behind those of `lora_tiles_kernel` if there is room. All programs of a tile
    read it: the cache shall keep it longer than matrices, which pass through once.
    """
    if ENTRY > 0:
        own = start_loc + tile * ENTRY
        slot = tl.load(own, eviction_policy="evict_last")
        first = tl.load(own + 1, eviction_policy="evict_last")
        end = tl.load(own + 2, eviction_policy="evict_last")
    else:
        starts, ends, tiles = _slots(start_loc, num_groups, num_rows, BLOCK_S, BLOCK_M, OTHERS)
        slots, end_tiles = tl.arange(0, BLOCK_S), tl.cumsum(tiles, 0)
        slot = tl.sum(((end_tiles <= tile) & (slots < num_groups)).to(tl.int32), 0)
        is_own = slots == slot
        first = tl.sum(tl.where(is_own, starts + (tile - end_tiles + tiles) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(is_own, ends, 0), 0)
    lanes = tl.arange(0, BLOCK_M)
    live = first + lanes < end
    places = tl.where(live, first + lanes, first)
    if ENTRY > BLOCK_M:
        rows = tl.load(own + (ENTRY - BLOCK_M) + lanes, eviction_policy="evict_last")
    else:
        rows = tl.load(token_indices + places)
    return slot, places, rows.to(tl.int64), live


@triton.jit
def _slots(start_loc, num_groups, num_rows, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, OTHERS: tl.constexpr):
    """First place, end and number of tiles of each slot."""
    slots = tl.arange(0, BLOCK_S)
    is_slot = slots < num_groups
    starts = tl.load(start_loc + slots, mask=is_slot, other=0)
    if OTHERS:
        ends = tl.load(start_loc + slots + 1, mask=slots + 1 < num_groups, other=num_rows)
        ends = tl.where(is_slot, ends, 0)
    else:
        ends = tl.load(start_loc + slots + 1, mask=is_slot, other=0)
    return starts, ends, (ends - starts + BLOCK_M - 1) // BLOCK_M
