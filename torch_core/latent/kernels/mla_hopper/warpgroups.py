"""The warpgroups of the Hopper latent kernel: one makes weights, two weigh the halves of latents and load them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.device.gluon_names import thread_barrier
from torch_core.device.hopper_latents import BLOCK_N, places_of, store_sums, visible_latents
from torch_core.device.hopper_rows import mask_scores
from torch_core.device.mask import LOG2E
from torch_core.latent.kernels.mla_hopper.loads import GATHERED, ROWS, SLOTS, load_half, load_query, slot_of
from torch_core.latent.kernels.mla_hopper.weighing import store_weighed, weigh_tile, zero_sums

# A maximum that grows by no more bits than this stays the reference of weights: they are up to 2^8 then.
_SLACK = gl.constexpr(8.0)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def make_weights(work, scale, window_right, room, results, SHAPE: gl.constexpr):
    """One warpgroup: scores of every tile, and the softmax, whose weights it leaves for the other two."""
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, _SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    rows = work.first_row + gl.arange(0, ROWS, layout=IN_ROWS)
    tokens = rows // SHAPE.NUM_HEADS
    last, full_end = visible_latents(tokens, work, window_right, SHAPE)
    factor = scale * LOG2E
    row_max = gl.full([ROWS], float("-inf"), gl.float32, IN_ROWS)
    row_sum = _thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, _SCORES))
    mbarrier.wait(room.query_full, 0)
    query = (room.query[0].load(OPERAND), room.query[1], room.query[2].load(OPERAND))
    thread_barrier()
    mbarrier.arrive(room.query_read, count=1)
    position = work.start
    if work.tiles > 0:
        mbarrier.wait(room.latents.full.index(0), 0)
        fence_async_shared()
    for step in range(work.tiles):
        s = _scores(step, query, room, SHAPE)
        row_max, row_sum = _leave_weights(s, step, position, last, full_end, factor, row_max, row_sum, work, room)
        position += BLOCK_N

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), IN_ROWS)
    last_factor = store_sums(row_max, row_sum, rows, tokens, work, results, SHAPE)
    mbarrier.wait(room.weights.empty.index(0), (work.tiles & 1) ^ 1)
    room.factors.store(last_factor)
    mbarrier.arrive(room.weights.full.index(0), count=1)


@gluon.jit
def _scores(step, query, room, SHAPE: gl.constexpr):
    """The products of the query and the tile number `step`, whose first half has come."""
    slot, _ = slot_of(2 * step, room)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, _SCORES)
    s = warpgroup_mma(query[0], room.latents.tiles.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    slot, phase = slot_of(2 * step + 1, room)
    mbarrier.wait(room.latents.full.index(slot), phase)
    if SHAPE.BOX == 0:
        fence_async_shared()
    s = warpgroup_mma(query[1], room.latents.tiles.index(slot).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query[2], room.rope.index(step % room.rope.shape[0]).permute((1, 0)), s, is_async=True)
    if room.scored is not None:
        # Until the first of the three products is done; the weights of no tile wait for the first tile's.
        s = warpgroup_mma_wait(2, deps=(s,))
        if step > 0:
            mbarrier.arrive(room.scored, count=1)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _leave_weights(s, step, position, last, full_end, factor, row_max, row_sum, work, room):
    """A step of the softmax: leaves weights and factors for the other warpgroups. Returns the new maxima and sums."""
    if position + BLOCK_N > full_end:
        s = mask_scores(s, last, last - position, False)
    tile_max = gl.max(s, 1) * factor
    new_max = gl.where(tile_max > row_max + _SLACK, tile_max, row_max)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(s * factor - shift[:, None])
    keep = gl.exp2(row_max - shift)
    parts = gl.convert_layout(keep, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * parts[:, None] + _thread_sums(weights)
    mbarrier.wait(room.weights.empty.index(0), (step & 1) ^ 1)
    room.weights.tiles.store(weights.to(room.weights.tiles.dtype))
    room.factors.store(keep)
    if step + 1 < work.tiles:
        # The fence is for the next tile's first half too: latents that threads copied. The other warpgroups read a tile
        # after this one has told them of its weights.
        slot, phase = slot_of(2 * step + 2, room)
        mbarrier.wait(room.latents.full.index(slot), phase)
    fence_async_shared()
    mbarrier.arrive(room.weights.full.index(0), count=1)
    return new_max, row_sum


@gluon.jit
def _thread_sums(s):
    """The sums of rows over the columns of each thread, `[64, 8]`."""
    return gl.sum(s.reshape([ROWS, BLOCK_N // 8, 8]), 1)


@gluon.jit
def weigh_latents(OWN: gl.constexpr, work, source, room, results, SHAPE: gl.constexpr):
    """One warpgroup: adds up the half OWN of weighted latents, stores it, and loads latents into free slots."""
    # Half number 2 * i + OWN gives its slot to half PART of tile i + LEAD.
    PART: gl.constexpr = (OWN + SLOTS) % 2
    LEAD: gl.constexpr = (OWN + SLOTS) // 2
    if OWN == 0:
        load_query(work, source, room, SHAPE)
    for step in gl.static_range(2):
        if step < work.tiles:
            load_half(OWN, step, places_of(work, source.table, step, GATHERED, SHAPE), work, source, room, SHAPE)
    if OWN == 0:
        mbarrier.wait(room.query_read, 0)
        if work.tiles > 2:
            load_half(0, 2, places_of(work, source.table, 2, GATHERED, SHAPE), work, source, room, SHAPE)
    acc = zero_sums()
    for step in range(work.tiles):
        boxes = places_of(work, source.table, step + LEAD, GATHERED, SHAPE)
        slot, phase = slot_of(2 * step + OWN, room)
        mbarrier.wait(room.latents.full.index(slot), phase)
        if (OWN == 1) & (step + 1 < work.tiles):
            mbarrier.wait(room.scored, step & 1)
        acc = weigh_tile(OWN, step, acc, room)
        if step + LEAD < work.tiles:
            load_half(PART, step + LEAD, boxes, work, source, room, SHAPE)
    store_weighed(OWN, acc, work, room, results, SHAPE)
