"""The warpgroups of the Hopper latent kernel that multiply: one makes weights, two weigh the halves of latents."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.attention.mla_hopper.work import BLOCK_N, HALF, ROWS
from torch_core.device.hopper_rows import finish_rows, mask_scores
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.mask import LOG2E
from torch_core.device.softmax import LN2

__all__ = ["make_weights", "weigh_latents"]


@gluon.jit
def make_weights(work, scale, window_right, room, results, SHAPE: gl.constexpr):
    """One warpgroup: scores of every tile, and the softmax, whose weights it leaves for the other two."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    dtype: gl.constexpr = room.query.dtype
    rows = work.first_row + gl.arange(0, ROWS, layout=IN_ROWS)
    tokens = rows // SHAPE.NUM_HEADS
    last = tokens * 0 + work.end - 1
    full_end = work.end
    if window_right is not None:
        last = gl.minimum(work.context + tokens + window_right, work.end - 1)
        full_end = gl.minimum(work.context + work.first_row // SHAPE.NUM_HEADS + window_right + 1, work.end)
    factor = scale * LOG2E
    row_max = gl.full([ROWS], float("-inf"), gl.float32, IN_ROWS)
    row_sum = gl.zeros([ROWS], gl.float32, IN_ROWS)
    mbarrier.wait(room.query_full, 0)
    position = work.start
    for step in range(work.tiles):
        slot, phase = ring_slot(room.latents, 2 * step)
        first = room.latents.tiles.index(slot).permute((1, 0))
        second = room.latents.tiles.index(slot + 1).permute((1, 0))
        s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        mbarrier.wait(room.latents.full.index(slot), phase)
        s = warpgroup_mma(room.query.index(0), first, s, use_acc=False, is_async=True)
        mbarrier.wait(room.latents.full.index(slot + 1), phase)
        s = warpgroup_mma(room.query.index(1), second, s, is_async=True)
        s = warpgroup_mma(room.query_rope, room.rope.index(slot // 2).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(room.latents.empty.index(slot), count=1)
        mbarrier.arrive(room.latents.empty.index(slot + 1), count=1)
        if position + BLOCK_N > full_end:
            s = mask_scores(s, last, last - position, False)
        new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        weights = gl.exp2(s * factor - shift[:, None])
        keep = gl.exp2(row_max - shift)
        row_sum = row_sum * keep + gl.sum(weights, 1)
        row_max = new_max
        mbarrier.wait(room.weights.empty.index(0), (step & 1) ^ 1)
        room.weights.tiles.store(weights.to(dtype))
        room.factors.store(keep)
        fence_async_shared()
        mbarrier.arrive(room.weights.full.index(0), count=1)
        position += BLOCK_N

    live = tokens < work.query_len
    heads = rows % SHAPE.NUM_HEADS
    last_factor = gl.full([ROWS], 1.0, gl.float32, IN_ROWS)
    if work.chunks == 1:
        empty = row_sum == 0.0
        shift = gl.where(empty, 0.0, row_max)
        inverse, shift, total = finish_rows(row_sum, shift, empty, 0, rows, results.output, SHAPE.NUM_HEADS)
        last_factor = inverse * results.output.factor
        if results.output.lse is not None:
            pointers = results.output.lse + (work.query_start + tokens).to(gl.int64) * SHAPE.NUM_HEADS + heads
            gl.store(pointers, gl.where(empty, float("-inf"), (shift + gl.log2(total)) * LN2), mask=live)
    elif results.rows is not None:
        slots = _slots(work, tokens, heads, results, SHAPE)
        gl.store(results.maxima + slots, row_max, mask=live)
        gl.store(results.sums + slots, row_sum, mask=live)
    mbarrier.wait(room.weights.empty.index(0), (work.tiles & 1) ^ 1)
    room.factors.store(last_factor)
    mbarrier.arrive(room.weights.full.index(0), count=1)


@gluon.jit
def weigh_latents(OWN: gl.constexpr, work, room, results, SHAPE: gl.constexpr):
    """One warpgroup: adds up the half OWN of weighted latents, and stores it."""
    # Not HALF columns at a time: with so many warps the assembler has too few registers for such products.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    acc = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    for step in range(work.tiles):
        slot, phase = ring_slot(room.latents, 2 * step + OWN)
        mbarrier.wait(room.latents.full.index(slot), phase)
        mbarrier.wait(room.weights.full.index(0), step & 1)
        acc = acc * room.factors.load(IN_ROWS)[:, None]
        acc = warpgroup_mma(room.weights.tiles, room.latents.tiles.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(room.weights.empty.index(0), count=1)
        mbarrier.arrive(room.latents.empty.index(slot), count=1)
    mbarrier.wait(room.weights.full.index(0), work.tiles & 1)
    acc = acc * room.factors.load(IN_ROWS)[:, None]
    rows = work.first_row + gl.arange(0, ROWS, layout=IN_ROWS)
    columns = OWN * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    tokens = rows // SHAPE.NUM_HEADS
    heads = rows % SHAPE.NUM_HEADS
    live = (tokens < work.query_len)[:, None]
    if work.chunks == 1:
        offsets = (work.query_start + tokens).to(gl.int64) * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
        finished = acc.to(results.output.out.dtype.element_ty)
        gl.store(results.output.out + offsets[:, None] + columns[None, :], finished, mask=live)
    elif results.rows is not None:
        offsets = _slots(work, tokens, heads, results, SHAPE) * (2 * HALF)
        gl.store(results.rows + offsets[:, None] + columns[None, :], acc, mask=live)


@gluon.jit
def _slots(work, tokens, heads, results, SHAPE: gl.constexpr):
    """Where attention_combine_kernel looks for the rows of a chunk."""
    row = work.seq.to(gl.int64) * SHAPE.MAX_QUERY + tokens
    return (row * results.max_chunks + work.index) * SHAPE.NUM_HEADS + heads
