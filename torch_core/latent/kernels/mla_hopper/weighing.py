"""Sums of weighted latents, half a row for a warpgroup: a tile of them, and their end."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.device.gluon_names import thread_barrier
from torch_core.device.hopper_latents import HALF, rescale_rows, slots_of
from torch_core.latent.kernels.mla_hopper.loads import ROWS, slot_of

_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def zero_sums():
    """The sums of no latents, `[64, 256]`."""
    return gl.zeros([ROWS, HALF], gl.float32, _SUMS)


@gluon.jit
def weigh_tile(OWN: gl.constexpr, step, acc, room):
    """Adds the half OWN of a tile, which has come, by the weights that it waits for."""
    slot, _ = slot_of(2 * step + OWN, room)
    mbarrier.wait(room.weights.full.index(0), step & 1)
    acc = rescale_rows(acc, room.factors.load(gl.SliceLayout(1, _SUMS)))
    acc = warpgroup_mma(room.weights.tiles, room.latents.tiles.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    # Every warp is done with the slot before it is filled again.
    thread_barrier()
    mbarrier.arrive(room.weights.empty.index(0), count=1)
    return acc


@gluon.jit
def store_weighed(OWN: gl.constexpr, acc, work, room, results, SHAPE: gl.constexpr):
    """Stores the half OWN of rows, finished or with other chunks of their sequence to come."""
    mbarrier.wait(room.weights.full.index(0), work.tiles & 1)
    acc = acc * room.factors.load(gl.SliceLayout(1, _SUMS))[:, None]
    if work.chunks == 1:
        _store(OWN, acc.to(results.output.out.dtype.element_ty), work, room, results, SHAPE)
    elif results.rows is not None:
        tokens, heads, columns = _places(OWN, work, _SUMS, SHAPE)
        offsets = slots_of(work, tokens, heads, SHAPE) * (2 * HALF)
        pointers = results.rows + offsets[:, None] + columns[None, :]
        gl.store(pointers, acc, mask=(tokens < work.query_len)[:, None])


@gluon.jit
def _store(OWN: gl.constexpr, finished, work, room, results, SHAPE: gl.constexpr):
    """Stores the half OWN of finished rows, in whole pieces of rows."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    # By way of the last slot of this half, which no warpgroup reads any more.
    slot, _ = slot_of(gl.maximum(2 * work.tiles - 2, 0) + OWN, room)
    tile = room.latents.tiles.index(slot)
    tile.store(finished)
    thread_barrier()
    tokens, heads, columns = _places(OWN, work, STORED, SHAPE)
    offsets = (work.query_start + tokens).to(gl.int64) * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
    pointers = results.output.out + offsets[:, None] + columns[None, :]
    gl.store(pointers, tile.load(STORED), mask=(tokens < work.query_len)[:, None])


@gluon.jit
def _places(OWN: gl.constexpr, work, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Query tokens and heads of the rows, and elements of the half OWN."""
    rows = work.first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = OWN * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    return rows // SHAPE.NUM_HEADS, rows % SHAPE.NUM_HEADS, columns
