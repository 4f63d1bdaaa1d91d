"""Pairs of a token and an expert, put in order: tiles of rows that share an expert."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["align_experts_kernel", "count_experts_kernel"]


@triton.jit
def count_experts_kernel(topk_ids, counts, num_pairs, CHUNK: tl.constexpr):
    """Grid: (experts,). Each program counts its own pairs, and not those of all again and again."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(topk_ids + first + lanes, mask=first + lanes < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def align_experts_kernel(
    topk_ids,
    counts,
    sorted_ids,
    tile_experts,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (experts,). Each program finds where its own pairs begin by the counts of all, and writes them.

    `sorted_ids` gets the pairs of an expert in their own order, filled up to whole tiles of BLOCK_M with -1, and
    `tile_experts` the expert of each tile, -1 behind the last one.
    """
    own_expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    experts = tl.arange(0, BLOCK_E)
    tiles = (tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0) + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(experts < own_expert, tiles, 0), 0)
    last_tile = first_tile + tl.sum(tl.where(experts == own_expert, tiles, 0), 0)
    place = first_tile * BLOCK_M
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(topk_ids + first + lanes, mask=first + lanes < num_pairs, other=-1)
        own = (ids == own_expert).to(tl.int32)
        tl.store(sorted_ids + place + tl.cumsum(own, 0) - 1, first + lanes, mask=own > 0)
        place += tl.sum(own, 0)
    fill = place + tl.arange(0, BLOCK_M)
    tl.store(sorted_ids + fill, -1, mask=fill < last_tile * BLOCK_M)
    for first in range(first_tile, last_tile, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        tl.store(tile_experts + rows, own_expert, mask=rows < last_tile)
    if own_expert == NUM_EXPERTS - 1:
        for first in range(last_tile, num_tiles, BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            tl.store(tile_experts + rows, -1, mask=rows < num_tiles)
