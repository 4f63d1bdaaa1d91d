"""The warps of the Hopper prefill kernel that load: query, key and value tiles, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.device.hopper_items import item_count, read_item
from torch_core.device.hopper_work import copy_query, copy_tile, key_tiles, tile_blocks, tile_rows, zero_outside
from torch_core.device.mask import visible_keys


@gluon.jit
def load_keys(call, rings, SHAPE: gl.constexpr):
    """One warp: copies the key tiles of each work item, last keys first."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    STAGES: gl.constexpr = rings.key.full.shape[0]
    keys = rings.key
    turns = item_count(call.num_items)
    if turns > 0:
        _, head, table, low, high, _, base, first_tile, end_tile, blocks = _next_item(0, call, rings.items, 0, SHAPE)
        step = 0
        for turn in range(turns):
            column = head // SHAPE.GROUP * SHAPE.KEY_STRIDE
            tiles = end_tile - first_tile
            position = (end_tile - 1) * BLOCK_N
            for i in range(tiles):
                stage = step % STAGES
                # The table is read one tile ahead, also of the next work item, while this tile waits for its slot;
                # the entries are used after that wait.
                ahead = blocks
                if i + 1 < tiles:
                    ahead = tile_blocks(table, position - BLOCK_N, low, high, base, SHAPE)
                elif turn + 1 < turns:
                    _, head, table, low, high, _, base, first_tile, end_tile, ahead = _next_item(
                        turn + 1, call, rings.items, 0, SHAPE
                    )
                mbarrier.wait(keys.empty.index(stage), ((step // STAGES) & 1) ^ 1)
                boxes = tile_rows(blocks, position, 0, SHAPE)
                copy_tile(
                    call.key_cache, boxes, column, keys.full.index(stage), keys.tiles, stage, SHAPE, call.key_rest,
                    rings.key_rest,
                )  # fmt: skip
                blocks = ahead
                position -= BLOCK_N
                step += 1


@gluon.jit
def load_queries_and_values(call, rings, SHAPE: gl.constexpr):
    """One warp: copies the query tile of each work item and its value tiles; zeros rows of other sequences.

    Values are needed later than keys, so that it is the one to wait for the room of a query tile.
    """
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    BOX: gl.constexpr = SHAPE.BOX
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    QUERY_STAGES: gl.constexpr = rings.query.full.shape[0]
    STAGES: gl.constexpr = rings.value.full.shape[0]
    queries = rings.query
    values = rings.value
    raw = rings.raw
    turns = item_count(call.num_items)
    if turns > 0:
        first_row, head, table, low, high, num_keys, base, first_tile, end_tile, blocks = _next_item(
            0, call, rings.items, SHAPE.VALUE_ROW, SHAPE
        )
        step = 0
        raw_phase = 0
        for turn in range(turns):
            slot = turn % QUERY_STAGES
            mbarrier.wait(queries.empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
            copy_query(call, first_row, head, rings, slot, SHAPE)
            column = head // SHAPE.GROUP * SHAPE.VALUE_STRIDE
            tiles = end_tile - first_tile
            position = (end_tile - 1) * BLOCK_N
            for i in range(tiles):
                stage = step % STAGES
                zero_below = low - position
                zero_from = num_keys - position
                # Boxes that reach out of the sequence: of its last tile, and of the first one in a window.
                ragged = (position + BLOCK_N >= high) & ((high + BOX - 1) // BOX * BOX > num_keys)
                if call.bounds.window_left is not None:
                    ragged = ragged | ((position <= low) & (low % BOX != 0))
                ahead = blocks
                if i + 1 < tiles:
                    ahead = tile_blocks(table, position - BLOCK_N, low, high, base, SHAPE)
                elif turn + 1 < turns:
                    first_row, head, table, low, high, num_keys, base, first_tile, end_tile, ahead = _next_item(
                        turn + 1, call, rings.items, SHAPE.VALUE_ROW, SHAPE
                    )
                mbarrier.wait(values.empty.index(stage), ((step // STAGES) & 1) ^ 1)
                boxes = tile_rows(blocks, position, SHAPE.VALUE_ROW, SHAPE)
                if ragged:
                    copy_tile(call.value_cache, boxes, column, raw, values.tiles, stage, SHAPE)
                    mbarrier.wait(raw, raw_phase)
                    raw_phase ^= 1
                    zero_outside(values.tiles.index(stage), zero_below, zero_from, BLOCK_N, HEAD_SIZE)
                    fence_async_shared()
                    mbarrier.arrive(values.full.index(stage), count=1)
                else:
                    copy_tile(call.value_cache, boxes, column, values.full.index(stage), values.tiles, stage, SHAPE)
                blocks = ahead
                position -= BLOCK_N
                step += 1


@gluon.jit
def _next_item(turn, call, items, BASE: gl.constexpr, SHAPE: gl.constexpr):
    """The work item of a turn: (query row, head, table, low, high, keys, base row, first tile, end tile, blocks)."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    first_row, tokens, first_pos, num_keys, head, seq, first_key, _ = read_item(items, turn)
    low, high = visible_keys(first_pos, first_pos + tokens - 1, num_keys, call.bounds, 0)
    if call.split is not None:
        low = gl.maximum(low, first_key)
        first_key = 0
    first_tile, end_tile = key_tiles(low, high, SHAPE)
    base = first_key + BASE
    table = first_key
    if SHAPE.PAGED:
        table = call.batch.block_tables + seq.to(gl.int64) * call.batch.table_stride
    blocks = tile_blocks(table, (end_tile - 1) * BLOCK_N, low, high, base, SHAPE)
    return first_row, head, table, low, high, num_keys, base, first_tile, end_tile, blocks
