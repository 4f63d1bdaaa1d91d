"""The products of low-rank adapters: rows to a slot's ranks, and these to the columns of the linear layer."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.adapters.kernels.lora.places import tile_rows


@triton.jit
def lora_shrink_kernel(
    x,
    lora_a,
    lora_b,
    token_indices,
    start_loc,
    inner,
    num_slots,
    num_rows,
    x_stride,
    IN: tl.constexpr,
    ROWS_OF_INPUT: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST_HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
    SECOND: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    """Part of the inputs of `lora_a[slot] @ x[row]`, float32, at each row's place in the order of slots.

    Grid: (tiles of rows, tiles of ranks of each head, parts of PART inputs). A tile has rows of one slot; tiles after
    the last end at once. Each program has the L2 cache read AHEAD elements of the slot's second matrix, of SECOND, if
    that is not 0: memory would else have nothing to do while one launch ends and the next one begins.
    """
    slot, places, rows, live = tile_rows(
        start_loc, token_indices, tl.program_id(0), num_slots, num_rows, ENTRY, BLOCK_S, BLOCK_M
    )
    if slot < num_slots:
        head, tile = _head(tl.program_id(1), (ALL_RANKS + BLOCK_R - 1) // BLOCK_R, HEADS)
        first_rank, begin = tile * BLOCK_R, tl.program_id(2) * PART
        # Ranks behind the last repeat the first one, and their results are not stored.
        ranks = first_rank + tl.arange(0, BLOCK_R)
        known = ranks
        if ALL_RANKS % BLOCK_R != 0:
            known = tl.where(ranks < ALL_RANKS, ranks, 0)
        steps = tl.arange(0, BLOCK_K)
        matrix = _matrix(slot, head, FIRST_HEADS)
        right = lora_a + (matrix * ALL_RANKS + known[None, :]) * IN + (begin + steps)[:, None]
        left = x + (rows // ROWS_OF_INPUT)[:, None] * x_stride + (head * IN + begin + steps)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in tl.range(0, PART, BLOCK_K):
            if IN % PART == 0 and PART % BLOCK_K == 0:
                weights = tl.load(right + start)
                tokens = tl.load(left + start, mask=live[:, None], other=0.0, eviction_policy="evict_last")
            else:
                inside = start + steps < tl.minimum(IN - begin, PART)
                weights = tl.load(right + start, mask=inside[:, None], other=0.0)
                tokens = tl.load(left + start, mask=live[:, None] & inside[None, :], other=0.0)
            total = tl.dot(tokens, weights, total, input_precision="ieee")
        if AHEAD > 0:
            share = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
            read_ahead(lora_b + slot.to(tl.int64) * SECOND + share * AHEAD, AHEAD)
        part = tl.program_id(2).to(tl.int64) * num_rows
        target = inner + ((part + places) * HEADS + head)[:, None] * ALL_RANKS + ranks[None, :]
        tl.store(target, total, mask=live[:, None] & (ranks < ALL_RANKS)[None, :])


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
    SLICE_0: tl.constexpr,
    SLICE_1: tl.constexpr,
    SLICE_2: tl.constexpr,
    SLICE_3: tl.constexpr,
    SLICE_4: tl.constexpr,
    SLICE_5: tl.constexpr,
    DIVISOR: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    HEADS: tl.constexpr,
    SECOND_HEADS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds `lora_b[slot] @ inner` to the rows of y; without ADDS, y is that, and 0 in rows without a slot.

    Grid: (ranges of COLUMNS columns of each head, within slices; tiles of rows). DIVISOR divides all slices.
    """
    SIZE: tl.constexpr = SLICE_0 + SLICE_1 + SLICE_2 + SLICE_3 + SLICE_4 + SLICE_5
    IN_SLICES: tl.constexpr = DIVISOR % BLOCK_N == 0
    last = num_slots if ADDS else num_slots + 1
    slot, places, rows, live = tile_rows(
        start_loc, token_indices, tl.program_id(1), last, num_rows, ENTRY, BLOCK_S, BLOCK_M, not ADDS
    )
    if slot < last:
        head, tile = _head(tl.program_id(0), tl.num_programs(0) // HEADS, HEADS)
        index, first, inside = _range(tile, SLICE_0, SLICE_1, SLICE_2, SLICE_3, SLICE_4, SLICE_5, COLUMNS)
        if DIVISOR % COLUMNS == 0:
            first, inside = tile * COLUMNS, COLUMNS
        end = tl.minimum(inside, COLUMNS)
        ranks, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
        # No value behind the last rank takes part, of either matrix: a product with NaN is NaN.
        is_rank, has_slot = ranks < RANK, slot < num_slots
        matrix = _matrix(slot, head, SECOND_HEADS) * SIZE + first
        right = lora_b + (matrix + columns)[None, :] * RANK + ranks[:, None]
        known = has_slot & is_rank[:, None]
        target = y + rows[:, None] * y_stride + (head * SIZE + first + columns)[None, :]
        # A step's operands are under way while the step before it is computed, the first ones with the parts.
        if IN_SLICES:
            write = live[:, None] & (columns >= 0)[None, :]
            weights = tl.load(right, mask=known, other=0.0)
        else:
            write = live[:, None] & (columns < inside)[None, :]
            weights = tl.load(right, mask=known & (columns < inside)[None, :], other=0.0)
        if ADDS:
            old = tl.load(target, mask=write, other=0.0)
        needed = (live & has_slot)[:, None] & is_rank[None, :]
        ALL_RANKS: tl.constexpr = HEADS * NUM_SLICES * RANK
        own = inner + places.to(tl.int64)[:, None] * ALL_RANKS + ((head * NUM_SLICES + index) * RANK + ranks)[None, :]
        left = _sum_of_parts(own, needed, num_rows, ALL_RANKS, NUM_PARTS, BLOCK_P).to(lora_b.dtype.element_ty)
        for start in tl.range(0, end, BLOCK_N):
            added = tl.dot(left, weights, input_precision="ieee")
            following, writes_now = start + BLOCK_N, write
            if IN_SLICES:
                weights = tl.load(right + following * RANK, mask=known & (following < end), other=0.0)
            else:
                is_column = following + columns < end
                weights = tl.load(right + following * RANK, mask=known & is_column[None, :], other=0.0)
                write = live[:, None] & is_column[None, :]
            if ADDS:
                added += old.to(tl.float32)
                old = tl.load(target + following, mask=write & (following < end), other=0.0)
            tl.store(target + start, added.to(y.dtype.element_ty), mask=writes_now)


@triton.jit
def lora_gated_kernel(
    lora_b,
    token_indices,
    start_loc,
    inner,
    y,
    out,
    num_slots,
    num_rows,
    y_stride,
    out_stride,
    RANK: tl.constexpr,
    SLICE_0: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`silu(gate) * up` of the two halves of y, to which the products are added first; all rows are written.

    Grid: (ranges of COLUMNS columns of a half; tiles of rows).
    """
    slot, places, rows, live = tile_rows(
        start_loc, token_indices, tl.program_id(1), num_slots + 1, num_rows, 0, BLOCK_S, BLOCK_M, True
    )
    if slot <= num_slots:
        first = tl.program_id(0) * COLUMNS
        ranks, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
        is_rank, has_slot = ranks < RANK, slot < num_slots
        source = y + rows[:, None] * y_stride + (first + columns)[None, :]
        right = lora_b + (slot.to(tl.int64) * (2 * SLICE_0) + first + columns)[None, :] * RANK + ranks[:, None]
        write, known = live[:, None], has_slot & is_rank[:, None]
        # A step's operands are under way while the step before it is computed, the first ones with the parts.
        is_column = _in_half(first, columns, 0, SLICE_0, COLUMNS)
        gate = tl.load(source, mask=write & is_column, other=0.0)
        up = tl.load(source + SLICE_0, mask=write & is_column, other=0.0)
        weights = tl.load(right, mask=known & is_column, other=0.0)
        more_weights = tl.load(right + SLICE_0 * RANK, mask=known & is_column, other=0.0)
        needed = (live & has_slot)[:, None] & is_rank[None, :]
        own = inner + places.to(tl.int64)[:, None] * (2 * RANK) + ranks[None, :]
        of_gate = _sum_of_parts(own, needed, num_rows, 2 * RANK, NUM_PARTS, BLOCK_P).to(lora_b.dtype.element_ty)
        of_up = _sum_of_parts(own + RANK, needed, num_rows, 2 * RANK, NUM_PARTS, BLOCK_P).to(lora_b.dtype.element_ty)
        target = out + rows[:, None] * out_stride + (first + columns)[None, :]
        for start in tl.range(0, COLUMNS, BLOCK_N):
            new_gate = gate.to(tl.float32) + tl.dot(of_gate, weights, input_precision="ieee")
            new_up = up.to(tl.float32) + tl.dot(of_up, more_weights, input_precision="ieee")
            following = start + BLOCK_N
            is_next = _in_half(first, columns, following, SLICE_0, COLUMNS) & (following < COLUMNS)
            gate = tl.load(source + following, mask=write & is_next, other=0.0)
            up = tl.load(source + SLICE_0 + following, mask=write & is_next, other=0.0)
            weights = tl.load(right + following * RANK, mask=known & is_next, other=0.0)
            more_weights = tl.load(right + (SLICE_0 + following) * RANK, mask=known & is_next, other=0.0)
            result = (new_gate * tl.sigmoid(new_gate) * new_up).to(out.dtype.element_ty)
            tl.store(target + start, result, mask=write & _in_half(first, columns, start, SLICE_0, COLUMNS))


@triton.jit
def _in_half(first, columns, start, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether columns of a step are in the half. Where all are, the compiler sees it, which keeps accesses whole."""
    inside = columns >= 0
    if SIZE % COLUMNS != 0:
        inside = first + start + columns < SIZE
    return inside[None, :]


@triton.jit
def _sum_of_parts(own, needed, num_rows, STRIDE: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The sum of the parts of `inner`, of which `own` points into the first one; BLOCK_P are read together."""
    parts = tl.arange(0, BLOCK_P)
    size = num_rows.to(tl.int64) * STRIDE
    total = tl.zeros(needed.shape, tl.float32)
    for part in tl.static_range(0, NUM_PARTS, BLOCK_P):
        several = needed[None, :, :]
        if NUM_PARTS % BLOCK_P != 0:
            several = several & (part + parts < NUM_PARTS)[:, None, None]
        values = own[None, :, :] + ((part + parts) * size)[:, None, None]
        found = tl.load(values, mask=several, other=0.0, eviction_policy="evict_last")
        total += tl.sum(found, 0)
    return total


@triton.jit
def read_ahead(address, SIZE: tl.constexpr):
    """Has the L2 cache read this many elements, without waiting for them; address and bytes are multiples of 16."""
    NUM_BYTES: tl.constexpr = SIZE * (address.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [address, tl.full([], NUM_BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _head(index, COUNT, HEADS: tl.constexpr):
    """The head of a program, and its number among the COUNT ones of that head."""
    head, tile = 0, index
    if HEADS > 1:
        head, tile = index // COUNT, index % COUNT
    return head, tile


@triton.jit
def _matrix(slot, head, HEADS: tl.constexpr):
    """The number of a head's matrix, of which a slot has HEADS, or one for all heads."""
    matrix = slot.to(tl.int64)
    if HEADS > 1:
        matrix = matrix * HEADS + head
    return matrix


@triton.jit
def _range(
    tile,
    SLICE_0: tl.constexpr,
    SLICE_1: tl.constexpr,
    SLICE_2: tl.constexpr,
    SLICE_3: tl.constexpr,
    SLICE_4: tl.constexpr,
    SLICE_5: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The slice of a range of columns, its first column, and the number of columns from there to the slice's end."""
    index, before, start, size = 0, 0, 0, SLICE_0
    index, before, start, size = _next(tile, 1, index, before, start, size, SLICE_1, COLUMNS)
    index, before, start, size = _next(tile, 2, index, before, start, size, SLICE_2, COLUMNS)
    index, before, start, size = _next(tile, 3, index, before, start, size, SLICE_3, COLUMNS)
    index, before, start, size = _next(tile, 4, index, before, start, size, SLICE_4, COLUMNS)
    index, before, start, size = _next(tile, 5, index, before, start, size, SLICE_5, COLUMNS)
    return index, start + (tile - before) * COLUMNS, size - (tile - before) * COLUMNS


@triton.jit
def _next(tile, NUMBER: tl.constexpr, index, before, start, size, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Number, ranges before, start and size of the same slice, or of the next one if the range is behind."""
    if SIZE > 0:
        num_ranges = (size + COLUMNS - 1) // COLUMNS
        is_behind = (index == NUMBER - 1) & (tile >= before + num_ranges)
        index = tl.where(is_behind, NUMBER, index)
        before = tl.where(is_behind, before + num_ranges, before)
        start = tl.where(is_behind, start + size, start)
        size = tl.where(is_behind, SIZE, size)
    return index, before, start, size
