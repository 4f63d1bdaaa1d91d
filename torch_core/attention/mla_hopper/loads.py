"""The warp of the Hopper latent kernel that loads, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.attention.mla_hopper.work import BLOCK_N, HALF
from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.hopper_work import tile_rows, zero_outside

__all__ = ["load_tiles"]

# Bytes of a tile of rows: all of them have 64 rows of 2 * HALF + ROPE elements.
_BYTES = gl.constexpr(64 * (2 * 256 + 64) * 2)


@gluon.jit
def load_tiles(work, query, query_rope, latent_cache, latent_rope, table, room, SHAPE: gl.constexpr):
    """One warp: copies the rows of the query and then the chunk's latents, tile by tile.

    Slots that no token of the sequence owns are zeroed: their weight is 0, but 0 * NaN is NaN.
    """
    row = work.query_start * SHAPE.NUM_HEADS + work.first_row
    mbarrier.expect(room.query_full, _BYTES)
    for half in gl.static_range(2):
        async_load(query, [row, half * HALF], room.query_full, room.query.index(half))
    async_load(query_rope, [row, 2 * HALF], room.query_full, room.query_rope)
    position = work.start
    boxes = tile_rows(table, position, position, work.end, 0, SHAPE)
    phase = 0
    for step in range(work.tiles):
        slot, turn = ring_slot(room.latents, step)
        # The table is read one tile ahead, while this tile waits for its slot.
        ahead = tile_rows(table, position + BLOCK_N, position, work.end, 0, SHAPE)
        live = work.end - position
        full = room.latents.full.index(slot)
        mbarrier.wait(room.latents.empty.index(slot), turn ^ 1)
        if (live < BLOCK_N) & (live % SHAPE.BOX != 0):
            _copy(latent_cache, latent_rope, boxes, room.raw, room, slot, SHAPE)
            mbarrier.wait(room.raw, phase)
            phase ^= 1
            for half in gl.static_range(2):
                zero_outside(room.latents.tiles.index(2 * slot + half), 0, live, BLOCK_N, HALF)
            fence_async_shared()
            mbarrier.arrive(full, count=1)
        else:
            _copy(latent_cache, latent_rope, boxes, full, room, slot, SHAPE)
        boxes = ahead
        position += BLOCK_N


@gluon.jit
def _copy(latent_cache, latent_rope, boxes, barrier, room, slot, SHAPE: gl.constexpr):
    """Starts the copies of a tile, whose boxes start at the rows `boxes`; then `barrier` completes."""
    BOX: gl.constexpr = SHAPE.BOX
    lanes = gl.arange(0, 32, layout=boxes.type.layout)
    mbarrier.expect(barrier, _BYTES)
    for i in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lanes == i, boxes, 0), 0)
        for half in gl.static_range(2):
            async_load(
                latent_cache, [row, half * HALF], barrier, room.latents.tiles.index(2 * slot + half).slice(i * BOX, BOX)
            )
        async_load(latent_rope, [row, 2 * HALF], barrier, room.rope.index(slot).slice(i * BOX, BOX))
