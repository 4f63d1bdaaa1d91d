"""The warps of the fp8 Hopper prefill kernel that load: query, key and value tiles of bytes, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.hopper_turns import ring_slot
from torch_core.device.hopper_work import (
    chunk_of_tile,
    copy_query,
    copy_tile,
    key_tiles,
    tile_blocks,
    tile_rows,
    work_item,
)
from torch_core.device.mask import visible_keys


@gluon.jit
def load_fp8_keys(call, rings, SHAPE: gl.constexpr):
    """One warp: copies the key tiles of each work item, last keys first."""
    programs = gl.num_programs(0)
    step = 0
    for turn in range((call.num_items + programs - 1) // programs):
        item, seq, tile, head = work_item(turn, call, SHAPE)
        if item < call.num_items:
            _, _, _, num_keys, low, high, table, _, _ = _sequence(seq, tile, call, SHAPE)
            column = head * SHAPE.PACK // SHAPE.GROUP * SHAPE.KEY_STRIDE
            step = _copy_tiles(call.key_cache, rings.key, step, None, table, low, high, num_keys, column, 0, SHAPE)


@gluon.jit
def load_fp8_queries_and_values(call, rings, SHAPE: gl.constexpr):
    """One warp: copies query tiles, and for `transpose_values` value tiles as they lie in the cache.

    Values are needed later than keys, so that it is the one to wait for the room of a query tile.
    """
    QUERY_STAGES: gl.constexpr = rings.query.full.shape[0]
    queries = rings.query
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    programs = gl.num_programs(0)
    step = 0
    for turn in range((call.num_items + programs - 1) // programs):
        item, seq, tile, head = work_item(turn, call, SHAPE)
        if item < call.num_items:
            first_row, tokens, first_pos, num_keys, low, high, table, first_key, partial_row = _sequence(
                seq, tile, call, SHAPE
            )
            head *= SHAPE.PACK
            slot = turn % QUERY_STAGES
            mbarrier.wait(queries.empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
            values = gl.where(fields == 0, first_row, gl.where(fields == 1, tokens, first_pos))
            values = gl.where(fields == 3, num_keys, gl.where(fields == 4, head, values))
            if call.split is not None:
                values = gl.where(fields == 6, first_key, gl.where(fields == 7, partial_row, values))
            rings.told.index(slot).store(values)
            copy_query(call, first_row, head, rings, slot, SHAPE)
            column = head // SHAPE.GROUP * SHAPE.VALUE_STRIDE
            step = _copy_tiles(
                call.value_cache, rings.raw, step, rings.raw_bounds, table, low, high, num_keys, column,
                SHAPE.VALUE_ROW, SHAPE,
            )  # fmt: skip


@gluon.jit
def _copy_tiles(array, ring, step, bounds, table, low, high, num_keys, column, BASE: gl.constexpr, SHAPE: gl.constexpr):
    """Copies the tiles that hold the keys [low, high) into a ring, last ones first; returns the next step.

    `bounds` is None, or says for each slot which rows of its tile are keys of the sequence, [first, end), and how many
    tiles the work item has from this one on.
    """
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    fields = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [1], [0]))
    first_tile, end_tile = key_tiles(low, high, SHAPE)
    blocks = tile_blocks(table, (end_tile - 1) * BLOCK_N, low, high, BASE, SHAPE)
    for i in range(end_tile - first_tile):
        position = (end_tile - 1 - i) * BLOCK_N
        stage, phase = ring_slot(ring, step)
        # The table is read one tile ahead, while this one waits for its slot.
        ahead = tile_blocks(table, position - BLOCK_N, low, high, BASE, SHAPE)
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        boxes = tile_rows(blocks, position, BASE, SHAPE)
        if bounds is not None:
            values = gl.where(fields == 0, low - position, gl.where(fields == 1, num_keys - position, 0))
            bounds.index(stage).store(gl.where(fields == 2, end_tile - first_tile - i, values))
        copy_tile(array, boxes, column, ring.full.index(stage), ring.tiles, stage, SHAPE)
        blocks = ahead
        step += 1
    return step


@gluon.jit
def _sequence(seq, tile, call, SHAPE: gl.constexpr):
    """The rows and keys of a tile: (first query row, query tokens, first position, end of its keys, low key, high key,
    row of the table, first key of its chunk, row of the scratch); the last two are 0 unless keys are split."""
    TOKENS: gl.constexpr = 64 * SHAPE.WARPGROUPS // SHAPE.PACK
    batch = call.batch
    start = gl.load(batch.query_start_loc + seq)
    query_len = gl.load(batch.query_start_loc + seq + 1) - start
    seq_len = gl.load(batch.seq_lens + seq)
    num_keys = gl.minimum(seq_len, batch.table_tokens)
    first_key = 0
    partial_row = 0
    if call.split is not None:
        tile, first_key, num_keys, partial_row = chunk_of_tile(seq, tile, query_len, seq_len, num_keys, call, TOKENS)
    token = tile * TOKENS
    tokens = gl.minimum(query_len - token, TOKENS)
    first_pos = seq_len - query_len + token
    low, high = visible_keys(first_pos, first_pos + tokens - 1, num_keys, call.bounds, 0)
    if call.split is not None:
        low = gl.maximum(low, first_key)
    first_row = start + token
    table = batch.block_tables + seq.to(gl.int64) * batch.table_stride
    return first_row, tokens, first_pos, num_keys, low, high, table, first_key, partial_row
