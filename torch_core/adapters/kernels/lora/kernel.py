"""The products of low-rank adapters: rows to a slot's ranks, and these to the columns of the linear layer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lora_shrink_kernel(
    x,
    lora_a,
    token_indices,
    start_loc,
    inner,
    num_slots,
    num_rows,
    x_stride,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    """Part of the inputs of `lora_a[slot] @ x[row]`, float32, at each row's place in the order of slots.

    Grid: (tiles of rows, slices, parts of PART inputs). A tile has rows of one slot; tiles after the last end at once.
    """
    index, part = tl.program_id(1), tl.program_id(2)
    slot, places, live, rows = _tile_rows(start_loc, token_indices, tl.program_id(0), num_slots, BLOCK_S, BLOCK_M)
    if slot < num_slots:
        total = _product(
            x, lora_a, rows, slot, index, part * PART, x_stride, IN, RANK, NUM_SLICES, BLOCK_M, BLOCK_R, BLOCK_K, PART
        )
        ranks = tl.arange(0, BLOCK_R)
        target = inner + ((part.to(tl.int64) * NUM_SLICES + index) * num_rows + places[:, None]) * RANK + ranks[None, :]
        tl.store(target, total, mask=live[:, None] & (ranks < RANK)[None, :])


@triton.jit
def lora_expand_kernel(
    lora_b,
    token_indices,
    start_loc,
    inner,
    y,
    num_slots,
    num_rows,
    y_stride,
    RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_0: tl.constexpr,
    SLICE_1: tl.constexpr,
    SLICE_2: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds `lora_b[slot] @ inner` to the rows of y. Grid: (tiles of columns, within slices; tiles of rows)."""
    slot, places, live, rows = _tile_rows(start_loc, token_indices, tl.program_id(1), num_slots, BLOCK_S, BLOCK_M)
    if slot < num_slots:
        index, columns, inside = _tile_columns(tl.program_id(0), SLICE_0, SLICE_1, SLICE_2, BLOCK_N)
        matrix = slot.to(tl.int64) * (SLICE_0 + SLICE_1 + SLICE_2) + columns
        added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first_rank in range(0, RANK, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            is_rank = ranks < RANK
            # No value behind the last rank takes part, of either matrix: a product with NaN is NaN.
            weights = tl.load(lora_b + matrix[None, :] * RANK + ranks[:, None], mask=is_rank[:, None], other=0.0)
            own = inner + (index * num_rows + places[:, None]).to(tl.int64) * RANK + ranks[None, :]
            total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for _ in tl.static_range(NUM_PARTS):
                total += tl.load(own, mask=live[:, None] & is_rank[None, :], other=0.0)
                own += NUM_SLICES * num_rows * RANK
            added = tl.dot(total.to(weights.dtype), weights, added, input_precision="ieee")
        _add(y, added, rows, columns, live, inside, y_stride)


@triton.jit
def lora_few_rows_kernel(
    x,
    lora_a,
    lora_b,
    token_indices,
    start_loc,
    y,
    num_slots,
    x_stride,
    y_stride,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_0: tl.constexpr,
    SLICE_1: tl.constexpr,
    SLICE_2: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):
    """Both products in one launch: each tile of columns computes the first one for itself.

    Grid: (tiles of columns, within slices; tiles of rows). The first matrix comes from the L2 cache to all but one of
    the programs, which takes less time than a launch. PART is at least IN.
    """
    slot, _, live, rows = _tile_rows(start_loc, token_indices, tl.program_id(1), num_slots, BLOCK_S, BLOCK_M)
    if slot < num_slots:
        index, columns, inside = _tile_columns(tl.program_id(0), SLICE_0, SLICE_1, SLICE_2, BLOCK_N)
        ranks = tl.arange(0, BLOCK_R)
        matrix = slot.to(tl.int64) * (SLICE_0 + SLICE_1 + SLICE_2) + columns
        weights = tl.load(lora_b + matrix[None, :] * RANK + ranks[:, None], mask=(ranks < RANK)[:, None], other=0.0)
        total = _product(
            x, lora_a, rows, slot, index, 0, x_stride, IN, RANK, NUM_SLICES, BLOCK_M, BLOCK_R, BLOCK_K, PART
        )
        # The first product's columns behind the last rank repeat a rank's, and are finite if that is.
        total = tl.where((ranks < RANK)[None, :], total, 0.0)
        added = tl.dot(total.to(weights.dtype), weights, input_precision="ieee")
        _add(y, added, rows, columns, live, inside, y_stride)


@triton.jit
def _product(
    x, lora_a, rows, slot, index, begin, x_stride, IN: tl.constexpr, RANK: tl.constexpr, NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """`lora_a[slot] @ x[row]` of one slice, over PART inputs from `begin` on."""
    ranks, steps = tl.arange(0, BLOCK_R), begin + tl.arange(0, BLOCK_K)
    matrix = (slot.to(tl.int64) * NUM_SLICES + index) * RANK + tl.where(ranks < RANK, ranks, 0)
    left, right = x + rows[:, None] * x_stride, lora_a + matrix[None, :] * IN
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, PART, BLOCK_K):
        at = start + steps
        if IN % PART == 0 and PART % BLOCK_K == 0:
            tokens = tl.load(left + at[None, :])
            weights = tl.load(right + at[:, None])
        else:
            inside = at < tl.minimum(IN, begin + PART)
            tokens = tl.load(left + at[None, :], mask=inside[None, :], other=0.0)
            weights = tl.load(right + at[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(tokens, weights, total, input_precision="ieee")
    return total


@triton.jit
def _add(y, added, rows, columns, live, inside, y_stride):
    target = y + rows[:, None] * y_stride + columns[None, :]
    write = live[:, None] & inside[None, :]
    found = tl.load(target, mask=write, other=0.0).to(tl.float32)
    tl.store(target, (found + added).to(y.dtype.element_ty), mask=write)


@triton.jit
def _tile_columns(tile, SLICE_0: tl.constexpr, SLICE_1: tl.constexpr, SLICE_2: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slice of a tile of columns, and its columns, of which those outside of the slice are its first one."""
    TILES_0: tl.constexpr = (SLICE_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (SLICE_1 + BLOCK_N - 1) // BLOCK_N
    index = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_0 + TILES_1).to(tl.int32)
    before = tl.where(index == 0, 0, tl.where(index == 1, TILES_0, TILES_0 + TILES_1))
    start = tl.where(index == 0, 0, tl.where(index == 1, SLICE_0, SLICE_0 + SLICE_1))
    size = tl.where(index == 0, SLICE_0, tl.where(index == 1, SLICE_1, SLICE_2))
    offsets = (tile - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offsets < size
    return index, start + tl.where(inside, offsets, 0), inside


@triton.jit
def _tile_rows(start_loc, token_indices, tile, num_slots, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    """The slot of a tile of rows (num_slots for none), places in the order of slots, which are live, and the rows.

    A row that is not live is the tile's first one: no row depends on another, and its result is not stored.
    """
    slots = tl.arange(0, BLOCK_S)
    is_slot = slots < num_slots
    starts = tl.load(start_loc + slots, mask=is_slot, other=0)
    ends = tl.load(start_loc + slots + 1, mask=is_slot, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    end_tiles = tl.cumsum(tiles, 0)
    slot = tl.sum(((end_tiles <= tile) & is_slot).to(tl.int32), 0)
    is_own = slots == slot
    first = tl.sum(tl.where(is_own, starts + (tile - end_tiles + tiles) * BLOCK_M, 0), 0)
    places = first + tl.arange(0, BLOCK_M)
    live = places < tl.sum(tl.where(is_own, ends, 0), 0)
    return slot, places, live, tl.load(token_indices + tl.where(live, places, first)).to(tl.int64)
