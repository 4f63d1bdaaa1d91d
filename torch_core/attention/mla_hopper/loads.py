"""The warp of the Hopper latent kernel that loads, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.attention.mla_hopper.work import BLOCK_N, HALF
from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.hopper_work import tile_blocks, tile_rows, zero_outside

__all__ = ["load_tiles"]

# Bytes of 64 halves of a latent, and of 64 rotary keys.
_HALF_BYTES = gl.constexpr(64 * 256 * 2)
_ROPE_BYTES = gl.constexpr(64 * 64 * 2)


@gluon.jit
def load_tiles(work, query, query_rope, latent_cache, latent_rope, table, room, SHAPE: gl.constexpr):
    """One warp: copies the rows of the query and then the chunk's latents, tile by tile.

    Slots that no token of the sequence owns are zeroed: their weight is 0, but 0 * NaN is NaN.
    """
    row = work.query_start * SHAPE.NUM_HEADS + work.first_row
    mbarrier.expect(room.query_full, 2 * _HALF_BYTES + _ROPE_BYTES)
    for half in gl.static_range(2):
        async_load(query, [row, half * HALF], room.query_full, room.query.index(half))
    async_load(query_rope, [row, 2 * HALF], room.query_full, room.query_rope)
    position = work.start
    blocks = tile_blocks(table, position, position, work.end, 0, SHAPE)
    for step in range(work.tiles):
        slot, turn = ring_slot(room.latents, 2 * step)
        # The table is read one tile ahead, while this tile waits for its slot.
        ahead = tile_blocks(table, position + BLOCK_N, position, work.end, 0, SHAPE)
        boxes = tile_rows(blocks, position, 0, SHAPE)
        live = work.end - position
        for half in gl.static_range(2):
            full = room.latents.full.index(slot + half)
            mbarrier.wait(room.latents.empty.index(slot + half), turn ^ 1)
            if (live < BLOCK_N) & (live % SHAPE.BOX != 0):
                _copy(half, latent_cache, latent_rope, boxes, room.raw, room, slot, SHAPE)
                mbarrier.wait(room.raw, half)
                zero_outside(room.latents.tiles.index(slot + half), 0, live, BLOCK_N, HALF)
                fence_async_shared()
                mbarrier.arrive(full, count=1)
            else:
                _copy(half, latent_cache, latent_rope, boxes, full, room, slot, SHAPE)
        blocks = ahead
        position += BLOCK_N


@gluon.jit
def _copy(HALF_NUMBER: gl.constexpr, latent_cache, latent_rope, boxes, barrier, room, slot, SHAPE: gl.constexpr):
    """Starts the copies of half a tile, whose boxes start at the rows `boxes`; then `barrier` completes."""
    BOX: gl.constexpr = SHAPE.BOX
    lanes = gl.arange(0, 32, layout=boxes.type.layout)
    mbarrier.expect(barrier, _HALF_BYTES + HALF_NUMBER * _ROPE_BYTES)
    for i in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lanes == i, boxes, 0), 0)
        latents = room.latents.tiles.index(slot + HALF_NUMBER).slice(i * BOX, BOX)
        async_load(latent_cache, [row, HALF_NUMBER * HALF], barrier, latents)
        if HALF_NUMBER == 1:
            async_load(latent_rope, [row, 2 * HALF], barrier, room.rope.index(slot // 2).slice(i * BOX, BOX))
