"""The warp of the Hopper backward kernel that loads tiles, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.attention.kernels.backward_hopper.work import query_tile
from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.hopper_work import zero_outside


@gluon.jit
def load_tiles(item, tensors, rings, query_tiles, SHAPE: gl.constexpr):
    """One warp: copies the tile of keys and values, and then every tile of queries and output gradients that sees it.

    Rows that the sequence does not own, keys that none of its queries sees and queries that see no key are zeroed:
    their factors are 0, but 0 * NaN is NaN.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    unseen = item.lowest - item.tile * BLOCK_N
    phase = _load(
        tensors.value, item.first_key, item.kv_head * SHAPE.VALUE_STRIDE, unseen, item.keys, rings.value.tiles.index(0),
        None, rings.value.full.index(0), rings.raw, gl.to_tensor(0), 0,
    )  # fmt: skip
    phase = _load(
        tensors.key, item.first_key, item.kv_head * SHAPE.KEY_STRIDE, unseen, item.keys, rings.key.tiles.index(0),
        rings.key_rest, rings.key.full.index(0), rings.raw, phase, 0,
    )  # fmt: skip
    for step in range((item.end - item.start) * SHAPE.GROUP):
        tile = query_tile(item, step, SHAPE)
        head = item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP
        row = item.first_query + tile * BLOCK_M
        live = item.queries - tile * BLOCK_M
        # The first query that sees the sequence's first key.
        blind = item.first - (item.tile * BLOCK_N + tile * BLOCK_M)
        slot, slot_phase = ring_slot(rings.query, step)
        full = rings.query.full.index(slot)
        mbarrier.wait(rings.query.empty.index(slot), slot_phase ^ 1)
        rest = None if rings.query_rest is None else rings.query_rest.index(slot)
        phase = _load(
            tensors.query, row, head * SHAPE.QUERY_STRIDE, blind, live, rings.query.tiles.index(slot), rest, full,
            rings.raw, phase, 2 * BLOCK_M * 4,
        )  # fmt: skip
        place = head * query_tiles + item.first_tile + tile
        async_load(tensors.row_stats, [place * 2 * BLOCK_M], full, rings.stats.index(slot))
        slot, slot_phase = ring_slot(rings.d_out, step)
        mbarrier.wait(rings.d_out.empty.index(slot), slot_phase ^ 1)
        phase = _load(
            tensors.d_out, row, head * SHAPE.D_OUT_STRIDE, blind, live, rings.d_out.tiles.index(slot), None,
            rings.d_out.full.index(slot), rings.raw, phase, 0,
        )  # fmt: skip


@gluon.jit
def _load(array, row, column, low, high, tile, rest, full, raw, phase, MORE: gl.constexpr):
    """Starts the copy of a tile, and of the columns behind it that lie in `rest`, whose rows [low, high) count.

    MORE bytes for the barrier `full` come besides. Returns the phase of the barrier `raw` afterwards.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    BYTES: gl.constexpr = ROWS * 2 * (COLUMNS if rest is None else COLUMNS + rest.shape[1])
    if (low > 0) | (high < ROWS):
        mbarrier.expect(raw, BYTES)
        _copy(array, row, column, raw, tile, rest)
        mbarrier.wait(raw, phase)
        phase ^= 1
        _zero_outside(tile, low, high)
        if rest is not None:
            _zero_outside(rest, low, high)
        fence_async_shared()
        if MORE:
            mbarrier.expect(full, MORE)
        else:
            mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, BYTES + MORE)
        _copy(array, row, column, full, tile, rest)
    return phase


@gluon.jit
def _copy(array, row, column, barrier, tile, rest):
    COLUMNS: gl.constexpr = tile.shape[1]
    BOX: gl.constexpr = COLUMNS if rest is None else rest.shape[1]
    for i in gl.static_range(0, COLUMNS, BOX):
        async_load(array, [row, column + i], barrier, tile.slice(i, BOX, 1))
    if rest is not None:
        async_load(array, [row, column + COLUMNS], barrier, rest)


@gluon.jit
def _zero_outside(tile, low, high):
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    # Columns that a warp with few registers zeroes at a time.
    WIDTH: gl.constexpr = min(COLUMNS, 128)
    for i in gl.static_range(0, COLUMNS, WIDTH):
        zero_outside(tile.slice(i, WIDTH, 1), low, high, ROWS, WIDTH)
