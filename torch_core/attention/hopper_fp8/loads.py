"""The warps of the fp8 Hopper prefill kernel that load: query, key and value tiles of bytes, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from torch_core.attention.hopper.step import ring_slot
from torch_core.device.hopper_work import box_row, key_span, tile_rows, work_item

__all__ = ["load_fp8_queries_and_keys", "load_fp8_values"]


@gluon.jit
def load_fp8_queries_and_keys(
    query, key_cache, q_tiles, info, k_tiles, q_full, q_empty, k_full, k_empty,
    block_tables, seq_lens, query_start_loc, num_seqs, table_stride, table_tokens, window_left, window_right, num_items,
    NUM_HEADS: gl.constexpr, HEADS_TOGETHER: gl.constexpr, GROUP: gl.constexpr, MIN_QUERY: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr, QUERY_STAGES: gl.constexpr, QUERY_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the query tile of each work item and its key tiles, last keys first."""
    ROWS: gl.constexpr = 64 * WARPGROUPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    programs = gl.num_programs(0)
    step = 0
    for turn in range((num_items + programs - 1) // programs):
        item, seq, token, head = work_item(
            turn, query_start_loc, seq_lens, seq_lens, num_seqs, num_items, NUM_HEADS, HEADS_TOGETHER, ROWS, MIN_QUERY,
            True, False,
        )  # fmt: skip
        if item < num_items:
            first_row, rows, first_pos, num_keys, low, high, table = _sequence(
                seq, token, block_tables, seq_lens, query_start_loc, table_stride, table_tokens, window_left,
                window_right, ROWS,
            )  # fmt: skip
            slot = turn % QUERY_STAGES
            mbarrier.wait(q_empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
            values = gl.where(fields == 0, first_row, gl.where(fields == 1, rows, first_pos))
            values = gl.where(fields == 3, num_keys, gl.where(fields == 4, head, values))
            info.index(slot).store(values)
            mbarrier.expect(q_full.index(slot), ROWS * HEAD_SIZE)
            for i in gl.static_range(WARPGROUPS):
                tma.async_copy_global_to_shared(
                    query, [first_row + i * 64, head * QUERY_STRIDE], q_full.index(slot),
                    q_tiles.index(slot * WARPGROUPS + i),
                )  # fmt: skip
            column = head // GROUP * KEY_STRIDE
            first_tile = low // BLOCK_N
            end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
            boxes = tile_rows(table, (end_tile - 1) * BLOCK_N, low, high, 0, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, True)
            for i in range(end_tile - first_tile):
                position = (end_tile - 1 - i) * BLOCK_N
                stage, phase = ring_slot(step, STAGES)
                # The table is read one tile ahead, while this one waits for its slot.
                ahead = tile_rows(table, position - BLOCK_N, low, high, 0, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, True)
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_SIZE)
                for j in gl.static_range(BLOCK_N // BOX):
                    tma.async_copy_global_to_shared(
                        key_cache,
                        [box_row(boxes, j), column],
                        k_full.index(stage),
                        k_tiles.index(stage).slice(j * BOX, BOX),
                    )
                boxes = ahead
                step += 1


@gluon.jit
def load_fp8_values(
    value_cache, raw_tiles, bounds, raw_full, raw_empty,
    block_tables, seq_lens, query_start_loc, num_seqs, table_stride, table_tokens, window_left, window_right, num_items,
    NUM_HEADS: gl.constexpr, HEADS_TOGETHER: gl.constexpr, GROUP: gl.constexpr, MIN_QUERY: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr, RAW_STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr, VALUE_ROW: gl.constexpr, VALUE_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the value tiles of each work item as they lie in the cache.

    `bounds` tells the warpgroup that transposes a tile which of its rows are keys of the sequence, [first, end), and
    how many tiles the work item has from this one on.
    """
    ROWS: gl.constexpr = 64 * WARPGROUPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    programs = gl.num_programs(0)
    step = 0
    for turn in range((num_items + programs - 1) // programs):
        item, seq, token, head = work_item(
            turn, query_start_loc, seq_lens, seq_lens, num_seqs, num_items, NUM_HEADS, HEADS_TOGETHER, ROWS, MIN_QUERY,
            True, False,
        )  # fmt: skip
        if item < num_items:
            _, _, _, num_keys, low, high, table = _sequence(
                seq, token, block_tables, seq_lens, query_start_loc, table_stride, table_tokens, window_left,
                window_right, ROWS,
            )  # fmt: skip
            column = head // GROUP * VALUE_STRIDE
            first_tile = low // BLOCK_N
            end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
            boxes = tile_rows(
                table, (end_tile - 1) * BLOCK_N, low, high, VALUE_ROW, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, True
            )
            for i in range(end_tile - first_tile):
                position = (end_tile - 1 - i) * BLOCK_N
                stage, phase = ring_slot(step, RAW_STAGES)
                # The table is read one tile ahead, while this one waits for its slot.
                ahead = tile_rows(
                    table, position - BLOCK_N, low, high, VALUE_ROW, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, True
                )
                mbarrier.wait(raw_empty.index(stage), phase ^ 1)
                values = gl.where(fields == 0, low - position, gl.where(fields == 1, num_keys - position, 0))
                bounds.index(stage).store(gl.where(fields == 2, end_tile - first_tile - i, values))
                mbarrier.expect(raw_full.index(stage), BLOCK_N * HEAD_SIZE)
                for j in gl.static_range(BLOCK_N // BOX):
                    tma.async_copy_global_to_shared(
                        value_cache,
                        [box_row(boxes, j), column],
                        raw_full.index(stage),
                        raw_tiles.index(stage).slice(j * BOX, BOX),
                    )
                boxes = ahead
                step += 1


@gluon.jit
def _sequence(
    seq, token, block_tables, seq_lens, query_start_loc, table_stride, table_tokens, window_left, window_right,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Where a tile stands: (first query row, rows, first position, keys, low key, high key, row of the table)."""
    start = gl.load(query_start_loc + seq)
    query_len = gl.load(query_start_loc + seq + 1) - start
    seq_len = gl.load(seq_lens + seq)
    num_keys = gl.minimum(seq_len, table_tokens)
    rows = gl.minimum(query_len - token, ROWS)
    first_pos = seq_len - query_len + token
    low, high = key_span(first_pos, first_pos + rows - 1, num_keys, window_left, window_right)
    return start + token, rows, first_pos, num_keys, low, high, block_tables + seq.to(gl.int64) * table_stride
