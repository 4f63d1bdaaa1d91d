"""The warp of the Hopper backward kernel that loads tiles, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_core.device.hopper_turns import ring_slot
from torch_core.device.hopper_work import zero_outside

__all__ = ["load_tiles"]


@gluon.jit
def load_tiles(item, tensors, rings, query_tiles, SHAPE: gl.constexpr):
    """One warp: copies the tile of keys and values, and then every tile of queries and output gradients that sees it.

    Rows that the sequence does not own are zeroed: what is multiplied with them is 0, but 0 * NaN is NaN.
    """
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    raw = rings.raw
    raw_phase = 0
    _load_keys(tensors.value, item, SHAPE.VALUE_STRIDE, rings.value, raw, 0, HEAD_SIZE)
    _load_keys(tensors.key, item, SHAPE.KEY_STRIDE, rings.key, raw, 1, HEAD_SIZE)
    for step in range((item.end - item.start) * SHAPE.GROUP):
        tile = item.end - 1 - step // SHAPE.GROUP
        head = item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP
        row = item.first_query + tile * BLOCK_M
        live = item.queries - tile * BLOCK_M
        q_slot, q_phase = ring_slot(rings.query, step)
        mbarrier.wait(rings.query.empty.index(q_slot), q_phase ^ 1)
        q = rings.query.tiles.index(q_slot)
        q_full = rings.query.full.index(q_slot)
        if live < BLOCK_M:
            _load(tensors.query, row, head * SHAPE.QUERY_STRIDE, raw, q, BLOCK_M * HEAD_SIZE * 2)
            mbarrier.wait(raw, raw_phase)
            raw_phase ^= 1
            zero_outside(q, 0, live, BLOCK_M, HEAD_SIZE)
            fence_async_shared()
            mbarrier.expect(q_full, 2 * BLOCK_M * 4)
        else:
            _load(tensors.query, row, head * SHAPE.QUERY_STRIDE, q_full, q, BLOCK_M * HEAD_SIZE * 2 + 2 * BLOCK_M * 4)
        tma.async_copy_global_to_shared(
            tensors.row_stats, [(head * query_tiles + item.first_tile + tile) * 2 * BLOCK_M], q_full,
            rings.stats.index(q_slot),
        )  # fmt: skip
        do_slot, do_phase = ring_slot(rings.d_out, step)
        mbarrier.wait(rings.d_out.empty.index(do_slot), do_phase ^ 1)
        d_out = rings.d_out.tiles.index(do_slot)
        do_full = rings.d_out.full.index(do_slot)
        if live < BLOCK_M:
            _load(tensors.d_out, row, head * SHAPE.D_OUT_STRIDE, raw, d_out, BLOCK_M * HEAD_SIZE * 2)
            mbarrier.wait(raw, raw_phase)
            raw_phase ^= 1
            zero_outside(d_out, 0, live, BLOCK_M, HEAD_SIZE)
            fence_async_shared()
            mbarrier.arrive(do_full, count=1)
        else:
            _load(tensors.d_out, row, head * SHAPE.D_OUT_STRIDE, do_full, d_out, BLOCK_M * HEAD_SIZE * 2)


@gluon.jit
def _load(array, row, column, barrier, tile, BYTES: gl.constexpr):
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(array, [row, column], barrier, tile)


@gluon.jit
def _load_keys(array, item, stride, ring, raw, raw_phase, HEAD_SIZE: gl.constexpr):
    tile = ring.tiles.index(0)
    full = ring.full.index(0)
    column = item.kv_head * stride
    if item.keys < 128:
        _load(array, item.first_key, column, raw, tile, 128 * HEAD_SIZE * 2)
        mbarrier.wait(raw, raw_phase)
        zero_outside(tile, 0, item.keys, 128, HEAD_SIZE)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        _load(array, item.first_key, column, full, tile, 128 * HEAD_SIZE * 2)
