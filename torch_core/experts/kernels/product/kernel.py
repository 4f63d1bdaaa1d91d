"""The products of token rows with their experts' matrices, a tile for rows that share an expert, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.activation import gated


@triton.jit
def expert_product_kernel(
    x,
    kernel,
    bias,
    added,
    topk_ids,
    sorted_ids,
    tile_experts,
    activated,
    out,
    num_pairs,
    num_tiles,
    x_stride,
    kernel_expert_stride,
    kernel_row_stride,
    NUM_EXPERTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
    SORTED: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Row `pair` of out is row `pair // PAIRS_PER_ROW` of x times the kernel of the pair's expert.

    Grid: tiles of rows times tiles of BLOCK_N columns. With `topk_ids` a program has all rows of one expert, which it
    looks up among at most BLOCK_P pairs; with `sorted_ids` and `tile_experts` a tile of rows was made before, and if
    SORTED `out` has the rows of `sorted_ids`, those of padding too, which hold anything. With an ACTIVATION the result
    is that of the product or, if GATED, `act(gate) * up`: the kernel has the columns of both, one after the other. If
    COPIED the kernel is a descriptor of the rows of all experts, whose tiles the copy engine brings. A pair's row of
    `added` is added to its product before the activation; if SORTED its row of `activated` gets the result, too.
    """
    COLUMN_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_M)
    if topk_ids is not None:
        place = program // COLUMN_TILES
        column = (program % COLUMN_TILES) * BLOCK_N
        pairs = tl.arange(0, BLOCK_P)
        ids = tl.load(topk_ids + pairs, mask=pairs < num_pairs, other=-1)
        if BLOCK_P <= NUM_EXPERTS:
            # A program for each pair: the first pair of an expert has all of its rows.
            expert = tl.load(topk_ids + place)
            own = ids == expert
            is_first = tl.min(tl.where(own, pairs, BLOCK_P), 0) == place
            own = own & is_first & (expert >= 0) & (expert < NUM_EXPERTS)
        else:
            expert = place
            own = ids == expert
        found = own.to(tl.int32)
        ranks = tl.cumsum(found, 0) - 1
        count = tl.sum(found, 0)
        for first in range(0, count, BLOCK_M):
            rows = first + lanes
            is_row = own[None, :] & (ranks[None, :] == rows[:, None])
            places = tl.sum(tl.where(is_row, pairs[None, :], 0), 1)
            _product_tile(
                x, kernel, bias, added, activated, out, None, places, places, rows < count, expert, column,
                x_stride, kernel_expert_stride, kernel_row_stride,
                PAIRS_PER_ROW, IN, OUT, ACTIVATION, GATED, BLOCK_M, BLOCK_N, BLOCK_K, COPIED,
            )  # fmt: skip
    else:
        # Programs that run together share rows and columns: GROUP_M tiles of rows for each tile of columns.
        group = program // (GROUP_M * COLUMN_TILES)
        size = tl.minimum(num_tiles - group * GROUP_M, GROUP_M)
        tile = group * GROUP_M + (program % (GROUP_M * COLUMN_TILES)) % size
        column = ((program % (GROUP_M * COLUMN_TILES)) // size) * BLOCK_N
        expert = tl.load(tile_experts + tile)
        if expert >= 0:
            slots = tile * BLOCK_M + lanes
            ids = tl.load(sorted_ids + slots)
            if HALVES and tl.load(sorted_ids + tile * BLOCK_M + BLOCK_M // 2) < 0:
                # The last tile of an expert has half its rows on average: half the product will do for it then.
                upper_slots = tile * BLOCK_M + tl.arange(0, BLOCK_M // 2)
                upper = tl.load(sorted_ids + upper_slots)
                _product_tile(
                    x, kernel, bias, added, activated, out, sorted_ids, tl.maximum(upper, 0),
                    upper_slots if SORTED else upper, upper >= 0, expert, column,
                    x_stride, kernel_expert_stride, kernel_row_stride,
                    PAIRS_PER_ROW, IN, OUT, ACTIVATION, GATED, BLOCK_M // 2, BLOCK_N, BLOCK_K, COPIED,
                )  # fmt: skip
            else:
                _product_tile(
                    x, kernel, bias, added, activated, out, sorted_ids, tl.maximum(ids, 0), slots if SORTED else ids,
                    ids >= 0, expert, column,
                    x_stride, kernel_expert_stride, kernel_row_stride,
                    PAIRS_PER_ROW, IN, OUT, ACTIVATION, GATED, BLOCK_M, BLOCK_N, BLOCK_K, COPIED,
                )  # fmt: skip


@triton.jit
def combine_experts_kernel(
    rows, slots, topk_ids, topk_weights, out, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of BLOCK columns). Rows of ids that are no expert were not written and are not read.

    The row of a pair is its own, or stands in its slot where there are `slots`.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(topk_ids + pair)
        live = inside & (expert >= 0) & (expert < NUM_EXPERTS)
        place = pair
        if slots is not None:
            place = tl.load(slots + pair).to(tl.int64)
        row = tl.load(rows + place * SIZE + columns, mask=live, other=0.0).to(tl.float32)
        total += tl.where(live, tl.load(topk_weights + pair), 0.0) * row
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _product_tile(
    x, kernel, bias, added, activated, out, sorted_ids, pairs, places, live, expert, column, x_stride,
    kernel_expert_stride, kernel_row_stride,
    PAIRS_PER_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    # A row that is not live reads pair 0's: no row of a product depends on another, and this one is not stored.
    steps = tl.arange(0, BLOCK_K)
    rows = x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * x_stride + steps[None, :]
    columns = column + tl.arange(0, BLOCK_N)
    inside = columns < OUT
    # Columns behind the last one would belong to another row: they read the first one and are not stored.
    read = tl.where(inside, columns, 0) if OUT % BLOCK_N else columns
    if not COPIED:
        weights = kernel + expert.to(tl.int64) * kernel_expert_stride
        weights = weights + steps[:, None].to(tl.int64) * kernel_row_stride + read[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if added is not None:
        own_rows = added + pairs.to(tl.int64)[:, None] * (2 * OUT if GATED else OUT) + read[None, :]
        total += tl.load(own_rows).to(tl.float32)
        if GATED:
            total_up += tl.load(own_rows + OUT).to(tl.float32)
    for start in range(0, IN, BLOCK_K):
        if COPIED:
            left = tl.load(rows)
            right = kernel.load([expert * IN + start, column])
        elif IN % BLOCK_K == 0:
            left = tl.load(rows)
            right = tl.load(weights)
        else:
            left = tl.load(rows, mask=(start + steps < IN)[None, :], other=0.0)
            right = tl.load(weights, mask=(start + steps < IN)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if GATED:
            if COPIED:
                right = kernel.load([expert * IN + start, column + OUT])
            elif IN % BLOCK_K == 0:
                right = tl.load(weights + OUT)
            else:
                right = tl.load(weights + OUT, mask=(start + steps < IN)[:, None], other=0.0)
            total_up = tl.dot(left, right, total_up, input_precision="ieee")
        rows += BLOCK_K
        if not COPIED:
            weights += BLOCK_K * kernel_row_stride
    if bias is not None:
        own = bias + expert.to(tl.int64) * (2 * OUT if GATED else OUT) + read
        total += tl.load(own).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(own + OUT).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        total = gated(total, total_up if GATED else 1.0, ACTIVATION)
    target = out + places.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
    if activated is not None:
        # Looked up again: held for the whole product they would take registers.
        pairs = tl.maximum(tl.load(sorted_ids + places), 0)
        target = activated + pairs.to(tl.int64)[:, None] * OUT + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
