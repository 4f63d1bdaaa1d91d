"""The warpgroups of the kernel for few rows: each loads, converts and attends to every other tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.attention.mla_few.work import BLOCK_N, CHUNKS, COLUMNS, PART
from torch_core.attention.mla_hopper.loads import boxes_of
from torch_core.attention.mla_hopper.work import slots_of
from torch_core.device.gluon_names import async_load, reinterpret
from torch_core.device.hopper_rows import finish_rows
from torch_core.device.mask import LOG2E
from torch_core.device.softmax import LN2

__all__ = ["attend"]

# Of a packed row: all bytes, and where its scales and its rotary key start.
_PACKED_BYTES = gl.constexpr(656)
_SCALE_OFFSET = gl.constexpr(512)
_ROPE_OFFSET = gl.constexpr(528)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# A thread reads 16 bytes that lie together of each of two rows: rows and threads as in an operand of _PRODUCT.
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.jit
def attend(OWN: gl.constexpr, work, scale, window_right, source, room, results, SHAPE: gl.constexpr):
    """One warpgroup: attends to the tiles OWN, OWN + 2, ...; the first one merges and stores."""
    IN_COLUMNS: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    IN_KEYS: gl.constexpr = gl.SliceLayout(1, _PRODUCT)
    CODE_ROWS: gl.constexpr = gl.SliceLayout(1, _CODES)
    dtype: gl.constexpr = room.query.dtype
    PARTS: gl.constexpr = room.codes.shape[0] // 2
    columns = work.first_row + gl.arange(0, COLUMNS, layout=IN_COLUMNS)
    tokens = columns // SHAPE.NUM_HEADS
    last = tokens * 0 + work.end - 1
    full_end = work.end
    if window_right is not None:
        last = gl.minimum(work.context + tokens + window_right, work.end - 1)
        full_end = gl.minimum(work.context + work.first_row // SHAPE.NUM_HEADS + window_right + 1, work.end)
    factor = room.states.index(2).load(IN_COLUMNS) * (scale * LOG2E)
    column_max = gl.full([COLUMNS], float("-inf"), gl.float32, IN_COLUMNS)
    sums = gl.zeros([BLOCK_N, COLUMNS], gl.float32, _PRODUCT)
    acc = gl.zeros([512, COLUMNS], gl.float32, _PRODUCT)
    values = room.latents.index(OWN)
    weights = room.weights.index(OWN)
    boxes = boxes_of(work, source.table, OWN, SHAPE)
    if work.tiles > OWN:
        _load(OWN, boxes, source, room, SHAPE)
    if source.packed is not None:
        rope, scales = _rest(_rows(work, source.table, OWN, SHAPE), source, room)
        rows = _rows(work, source.table, OWN + 2, SHAPE)
    for step in range(OWN, work.tiles, 2):
        boxes = boxes_of(work, source.table, step + 2, SHAPE)
        position = work.start + step * BLOCK_N
        live = work.end - position
        s = gl.zeros([BLOCK_N, COLUMNS], gl.float32, _PRODUCT)
        mbarrier.wait(room.full.index(OWN), step // 2 & 1)
        if live < BLOCK_N:
            # What no token owns may be NaN, and its weight of 0 would not help.
            inside = gl.arange(0, BLOCK_N, layout=CODE_ROWS) < live
            for i in range(PARTS):
                tile = room.codes.index(OWN * PARTS + i)
                part = tile.load(_CODES).to(gl.int8, bitcast=True)
                part = gl.where(inside[:, None], part, gl.zeros([BLOCK_N, PART], gl.int8, _CODES))
                tile.store(part.to(tile.dtype, bitcast=True))
        for i in gl.static_range(CHUNKS):
            if i < PARTS:
                part = room.codes.index(OWN * PARTS + i).load(_CODES)
                if source.packed is not None:
                    part = part.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scales[i // 2][:, None]
                part = part.to(dtype)
            else:
                part = rope
            if i < 8:
                values.slice(i * PART, PART, dim=1).store(part)
            s = warpgroup_mma(_operand(part), room.query.index(i).permute((1, 0)), s, use_acc=i > 0, is_async=True)
            # No more than two parts stay in registers.
            s = warpgroup_mma_wait(1, deps=(s,))
        # Stored latents are read by products, and the codes' room is filled by the copy engine.
        fence_async_shared()
        gl.thread_barrier()
        if step + 2 < work.tiles:
            _load(OWN, boxes, source, room, SHAPE)
            if source.packed is not None:
                rope, scales = _rest(rows, source, room)
                rows = _rows(work, source.table, step + 4, SHAPE)
        s = warpgroup_mma_wait(0, deps=(s,))
        if position + BLOCK_N > full_end:
            keys = position + gl.arange(0, BLOCK_N, layout=IN_KEYS)
            s = gl.where(keys[:, None] <= last[None, :], s, float("-inf"))
        new_max = gl.maximum(column_max, gl.max(s, 0) * factor)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s * factor[None, :] - shift[None, :])
        keep = gl.exp2(column_max - shift)
        column_max = new_max
        sums = sums * keep[None, :] + p
        weights.store(p.to(dtype))
        fence_async_shared()
        acc = acc * keep[None, :]
        gl.thread_barrier()
        acc = warpgroup_mma(values.permute((1, 0)), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # Every warp is done with the values before they are written again.
        gl.thread_barrier()

    column_sum = gl.sum(sums, 0)
    LEFT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    left = reinterpret(room.latents.index(1), gl.float32, 1024, COLUMNS, LEFT).slice(0, 512)
    if OWN == 1:
        left.store(acc)
        room.states.index(0).store(column_max)
        room.states.index(1).store(column_sum)
        gl.thread_barrier()
        mbarrier.arrive(room.other, count=1)
    else:
        mbarrier.wait(room.other, 0)
        other_max = room.states.index(0).load(IN_COLUMNS)
        new_max = gl.maximum(column_max, other_max)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        keep, keep_other = gl.exp2(column_max - shift), gl.exp2(other_max - shift)
        column_sum = column_sum * keep + room.states.index(1).load(IN_COLUMNS) * keep_other
        acc = acc * keep[None, :] + left.load(_PRODUCT) * keep_other[None, :]
        _store(acc, new_max, column_sum, columns, work, results, SHAPE)


@gluon.jit
def _operand(part):
    """A part of a tile as the operand of a product, its elements in the order of the query's in shared memory."""
    part = part.reshape([BLOCK_N, 4, 4, 2, 2]).permute(0, 2, 3, 1, 4).reshape([BLOCK_N, PART])
    return gl.convert_layout(part, gl.DotOperandLayout(0, _PRODUCT, 2))


@gluon.jit
def _load(OWN: gl.constexpr, boxes, source, room, SHAPE: gl.constexpr):
    BOX: gl.constexpr = SHAPE.BOX
    lanes = gl.arange(0, 32, layout=boxes.type.layout)
    full = room.full.index(OWN)
    PARTS: gl.constexpr = room.codes.shape[0] // 2
    mbarrier.expect(full, PARTS * PART * BLOCK_N)
    for i in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lanes == i, boxes, 0), 0)
        for j in gl.static_range(PARTS):
            codes = room.codes.index(OWN * PARTS + j).slice(i * BOX, BOX)
            async_load(source.latent_cache, [row, j * PART], full, codes)


@gluon.jit
def _rows(work, table, step, SHAPE: gl.constexpr):
    """Rows in the cache's matrix of the tokens of a tile; -1 where there is none."""
    key = work.start + step * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _CODES))
    inside = key < work.end
    block = gl.load(table + key // SHAPE.BLOCK_SIZE, mask=inside, other=0)
    return gl.where(inside, block * SHAPE.BLOCK_ROWS + key % SHAPE.BLOCK_SIZE, -1)


@gluon.jit
def _rest(rows, source, room):
    """What packed rows hold besides codes: rotary keys as they are multiplied, and the scale of each group."""
    inside = rows >= 0
    bytes_ = source.packed + rows.to(gl.int64) * _PACKED_BYTES
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, _CODES))
    rope = (bytes_ + _ROPE_OFFSET).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    rope = gl.load(rope[:, None] + columns[None, :], mask=inside[:, None] & (columns >= 0)[None, :], other=0.0)
    scale = (bytes_ + _SCALE_OFFSET).to(gl.pointer_type(gl.float32), bitcast=True)
    scales = (
        gl.load(scale, mask=inside, other=0.0),
        gl.load(scale + 1, mask=inside, other=0.0),
        gl.load(scale + 2, mask=inside, other=0.0),
        gl.load(scale + 3, mask=inside, other=0.0),
    )
    return rope.to(room.query.dtype), scales


@gluon.jit
def _store(acc, column_max, column_sum, columns, work, results, SHAPE: gl.constexpr):
    tokens = columns // SHAPE.NUM_HEADS
    heads = columns % SHAPE.NUM_HEADS
    live = tokens < work.query_len
    elements = gl.arange(0, 512, layout=gl.SliceLayout(1, _PRODUCT))
    if work.chunks == 1:
        empty = column_sum == 0.0
        shift = gl.where(empty, 0.0, column_max)
        inverse, shift, total = finish_rows(column_sum, shift, empty, 0, columns, results.output, SHAPE.NUM_HEADS)
        if results.output.lse is not None:
            pointers = results.output.lse + (work.query_start + tokens).to(gl.int64) * SHAPE.NUM_HEADS + heads
            gl.store(pointers, gl.where(empty, float("-inf"), (shift + gl.log2(total)) * LN2), mask=live)
        offsets = (work.query_start + tokens).to(gl.int64) * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
        acc = acc * (inverse * results.output.factor)[None, :]
        finished = acc.to(results.output.out.dtype.element_ty)
        gl.store(results.output.out + offsets[None, :] + elements[:, None], finished, mask=live[None, :])
    elif results.rows is not None:
        slots = slots_of(work, tokens, heads, results, SHAPE)
        gl.store(results.maxima + slots, column_max, mask=live)
        gl.store(results.sums + slots, column_sum, mask=live)
        gl.store(results.rows + slots[None, :] * 512 + elements[:, None], acc, mask=live[None, :])
