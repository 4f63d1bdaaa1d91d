"""Shared memory of the Hopper latent kernel, and its loads by the copy engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.device.gluon_names import async_gather, async_load, thread_barrier
from torch_core.device.hopper_latents import BLOCK_N, HALF, ROPE
from torch_core.device.hopper_work import zero_outside

#: Rows (query token, head) of a program.
ROWS = gl.constexpr(64)
#: Halves of tiles that shared memory has room for: as they are, and unpacked. Rotary parts of tiles.
SLOTS = gl.constexpr(5)
CODED_SLOTS = gl.constexpr(4)
ROPES = gl.constexpr(3)
#: Eight threads copy 128 bytes of a gathered row side by side.
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Bytes of half a tile of 64 latents or query rows, and of 64 rotary keys.
_HALF_BYTES = gl.constexpr(64 * 256 * 2)
_ROPE_BYTES = gl.constexpr(64 * 64 * 2)


class Room(NamedTuple):
    """Shared memory."""

    # A ring whose slots are halves of tiles, so that scores start, and a next tile is copied, half by half: half h of
    # tile i is half number 2 * i + h of the ring.
    latents: Any
    rope: Any  # Rotary keys, a slot for each tile; they come with its second half.
    # The halves of the rows, and their rotary part. The first and the last lie in the last slots of `latents` and
    # `rope` until they have been read.
    query: Any
    query_full: Any  # A barrier: the query has come.
    query_read: Any  # A barrier: the parts in the rings have been read.
    # For each half a barrier for latents that are zeroed in part, or unpacked, before their slot counts as full.
    raw: Any
    # codes, scales, rope_codes: 8-bit latents of a tile as the cache holds them, for each half; the scales of packed
    # rows, likewise; rotary keys of 8 bits. None where there are none.
    codes: Any
    scales: Any
    rope_codes: Any
    weights: Any  # A ring of one slot: weights of a step.
    factors: Any  # Factors of the accumulated rows, which apply before the weights of the same slot are added.
    scored: Any  # A barrier: half of a tile's scores are there. None for 8-bit latents, which are unpacked meanwhile.


class Source(NamedTuple):
    """The sources of copies."""

    query: Any  # query, query_rope: rows (token, head), as seen for halves and for rotary parts.
    query_rope: Any
    latent_cache: Any  # latent_cache, latent_rope: rows of the cache, likewise.
    latent_rope: Any
    table: Any  # The sequence's blocks.


@gluon.jit
def load_query(work, source, room, SHAPE: gl.constexpr):
    """Starts the copies of the rows of the query."""
    row = work.query_start * SHAPE.NUM_HEADS + work.first_row
    mbarrier.expect(room.query_full, 2 * _HALF_BYTES + _ROPE_BYTES)
    async_load(source.query, [row, 0], room.query_full, room.query[0])
    async_load(source.query, [row, HALF], room.query_full, room.query[1])
    async_load(source.query_rope, [row, 2 * HALF], room.query_full, room.query[2])


@gluon.jit
def slot_of(number, room):
    """Slot and phase of a half's number."""
    SLOTS: gl.constexpr = room.latents.full.shape[0]
    turn = number // SLOTS
    return number - turn * SLOTS, turn & 1


@gluon.jit
def load_half(PART: gl.constexpr, step, boxes, work, source, room, SHAPE: gl.constexpr):
    """Loads the half PART of a tile."""
    slot, _ = slot_of(2 * step + PART, room)
    full = room.latents.full.index(slot)
    if SHAPE.BOX == 0:
        _gather(PART, slot, step, boxes, full, source, room, SHAPE)
    else:
        live = work.end - work.start - step * BLOCK_N
        if (live < BLOCK_N) & (live % SHAPE.BOX != 0):
            raw = room.raw.index(PART)
            _copy(PART, slot, step, boxes, raw, source, room, SHAPE)
            mbarrier.wait(raw, 0)
            zero_outside(room.latents.tiles.index(slot), 0, live, BLOCK_N, HALF)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(full, count=1)
        else:
            _copy(PART, slot, step, boxes, full, source, room, SHAPE)


@gluon.jit
def _gather(PART: gl.constexpr, slot, step, rows, barrier, source, room, SHAPE: gl.constexpr):
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, GATHERED))
    starts = source.latent_cache + rows.to(gl.int64) * SHAPE.BLOCK_ROWS
    inside = (rows >= 0)[:, None]
    pointers = starts[:, None] + (PART * HALF + columns)[None, :]
    async_gather(room.latents.tiles.index(slot), pointers, mask=inside)
    if PART == 1:
        columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, GATHERED))
        pointers = starts[:, None] + (2 * HALF + columns)[None, :]
        async_gather(room.rope.index(step % ROPES), pointers, mask=inside)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _copy(PART: gl.constexpr, slot, step, boxes, barrier, source, room, SHAPE: gl.constexpr):
    BOX: gl.constexpr = SHAPE.BOX
    lanes = gl.arange(0, 32, layout=boxes.type.layout)
    mbarrier.expect(barrier, _HALF_BYTES + PART * _ROPE_BYTES)
    for i in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lanes == i, boxes, 0), 0)
        latents = room.latents.tiles.index(slot).slice(i * BOX, BOX)
        async_load(source.latent_cache, [row, PART * HALF], barrier, latents)
        if PART == 1:
            rope = room.rope.index(step % ROPES).slice(i * BOX, BOX)
            async_load(source.latent_rope, [row, 2 * HALF], barrier, rope)
