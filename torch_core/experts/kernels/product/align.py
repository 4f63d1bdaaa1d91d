"""Pairs of a token and an expert, put in order: tiles of rows that share an expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_experts_kernel(
    topk_ids, counts, num_pairs, share, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid: (shares of `share` pairs,). Each program counts the pairs of each expert among its own."""
    own = tl.program_id(0)
    lanes, experts = tl.arange(0, CHUNK), tl.arange(0, BLOCK_E)
    found = tl.zeros([BLOCK_E], tl.int32)
    for first in range(own * share, tl.minimum((own + 1) * share, num_pairs), CHUNK):
        ids = tl.load(topk_ids + first + lanes, mask=first + lanes < num_pairs, other=-1)
        found += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts + own * NUM_EXPERTS + experts, found, mask=experts < NUM_EXPERTS)


@triton.jit
def align_experts_kernel(
    topk_ids,
    counts,
    sorted_ids,
    tile_experts,
    slots,
    num_pairs,
    share,
    num_shares,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (shares of pairs, or more programs, which have none). Each program finds by the counts of all where its
    pairs belong, and writes them there.

    `sorted_ids` gets the pairs of an expert in their own order, filled up to whole tiles of BLOCK_M with -1, and
    `tile_experts` the expert of each tile, -1 behind the last one, and then how many tiles there are. `slots`, where it
    is given, gets the place in `sorted_ids` of each pair.
    """
    own = tl.program_id(0)
    lanes, experts = tl.arange(0, CHUNK), tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    before = tl.zeros([BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_shares, BLOCK_R):
        shares = first + tl.arange(0, BLOCK_R)
        read = (shares < num_shares)[:, None] & is_expert[None, :]
        found = tl.load(counts + shares[:, None] * NUM_EXPERTS + experts[None, :], mask=read, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((shares < own)[:, None], found, 0), 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    end_tile = tl.cumsum(tiles, 0)
    place = (end_tile - tiles) * BLOCK_M + before
    for first in range(own * share, tl.minimum((own + 1) * share, num_pairs), CHUNK):
        ids = tl.load(topk_ids + first + lanes, mask=first + lanes < num_pairs, other=-1)
        live = (ids >= 0) & (ids < NUM_EXPERTS)
        # The rank among the pairs of the same expert in this chunk.
        earlier = (ids[:, None] == ids[None, :]) & (lanes[None, :] < lanes[:, None])
        is_own = ids[:, None] == experts[None, :]
        target = tl.sum(tl.where(is_own, place[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(sorted_ids + target, first + lanes, mask=live)
        if slots is not None:
            tl.store(slots + first + lanes, target, mask=live)
        place += tl.sum(is_own.to(tl.int32), 0)
    # The rest is shared out by expert; the first program takes the places behind the last tile.
    rows = tl.arange(0, BLOCK_M)
    for expert in range(own, NUM_EXPERTS, tl.num_programs(0)):
        last = tl.sum(tl.where(experts == expert, end_tile, 0), 0)
        first = last - tl.sum(tl.where(experts == expert, tiles, 0), 0)
        fill = first * BLOCK_M + tl.sum(tl.where(experts == expert, total, 0), 0) + rows
        tl.store(sorted_ids + fill, -1, mask=fill < last * BLOCK_M)
        for tile in range(first, last, BLOCK_M):
            tl.store(tile_experts + tile + rows, expert, mask=tile + rows < last)
    if own == 0:
        tl.store(tile_experts + num_tiles, tl.max(end_tile, 0))
        for tile in range(tl.max(end_tile, 0), num_tiles, BLOCK_M):
            tl.store(tile_experts + tile + rows, -1, mask=tile + rows < num_tiles)
