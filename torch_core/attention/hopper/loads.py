"""The warps of the Hopper prefill kernel that load: query, key and value tiles, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_core.device.hopper_items import item_count, read_item
from torch_core.device.hopper_work import box_row, key_span, tile_rows, zero_outside

__all__ = ["load_keys", "load_queries_and_values"]


@gluon.jit
def load_keys(
    key_cache, k_tiles, items, item_full, item_empty, k_full, k_empty,
    block_tables, table_stride, window_left, window_right, num_items,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr, PAGED: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the key tiles of each work item, last keys first."""
    turns = item_count(num_items)
    if turns > 0:
        _, head, table, low, high, _, base, first_tile, end_tile, boxes = _next_item(
            0, items, item_full, item_empty, block_tables, table_stride, window_left, window_right, 0, BLOCK_N,
            BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED,
        )  # fmt: skip
        step = 0
        for turn in range(turns):
            column = head // GROUP * KEY_STRIDE
            tiles = end_tile - first_tile
            position = (end_tile - 1) * BLOCK_N
            for i in range(tiles):
                stage = step % STAGES
                # The table is read one tile ahead, also of the next work item, while this tile waits for its slot.
                ahead = boxes
                if i + 1 < tiles:
                    ahead = tile_rows(
                        table, position - BLOCK_N, low, high, base, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
                    )
                elif turn + 1 < turns:
                    _, head, table, low, high, _, base, first_tile, end_tile, ahead = _next_item(
                        turn + 1, items, item_full, item_empty, block_tables, table_stride, window_left, window_right,
                        0, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED,
                    )  # fmt: skip
                mbarrier.wait(k_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_SIZE * 2)
                for j in gl.static_range(BLOCK_N // BOX):
                    tma.async_copy_global_to_shared(
                        key_cache, [box_row(boxes, j), column], k_full.index(stage),
                        k_tiles.index(stage).slice(j * BOX, BOX),
                    )  # fmt: skip
                boxes = ahead
                position -= BLOCK_N
                step += 1


@gluon.jit
def load_queries_and_values(
    query, value_cache, q_tiles, v_tiles, items, item_full, item_empty, q_full, q_empty, v_full, v_empty, v_raw,
    block_tables, table_stride, window_left, window_right, num_items,
    GROUP: gl.constexpr, PACK: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr, PAGED: gl.constexpr, QUERY_STAGES: gl.constexpr, QUERY_STRIDE: gl.constexpr,
    VALUE_ROW: gl.constexpr, VALUE_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the query tile of each work item and its value tiles; zeros what no key of the sequence owns.

    Values are needed later than keys, so that it is the one to wait for the room of a query tile.
    """
    turns = item_count(num_items)
    if turns > 0:
        first_row, head, table, low, high, num_keys, base, first_tile, end_tile, boxes = _next_item(
            0, items, item_full, item_empty, block_tables, table_stride, window_left, window_right, VALUE_ROW,
            BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED,
        )  # fmt: skip
        step = 0
        raw_phase = 0
        for turn in range(turns):
            slot = turn % QUERY_STAGES
            mbarrier.wait(q_empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 64 * WARPGROUPS * HEAD_SIZE * 2)
            for i in gl.static_range(WARPGROUPS):
                if PACK == 1:
                    tma.async_copy_global_to_shared(
                        query, [first_row + i * 64, head * QUERY_STRIDE], q_full.index(slot),
                        q_tiles.index(slot * WARPGROUPS + i),
                    )  # fmt: skip
                else:
                    # Rows of a warpgroup are dense in shared memory, whatever axes of the query they come from.
                    tma.async_copy_global_to_shared(
                        query, [first_row + i * (64 // PACK), head, 0], q_full.index(slot),
                        q_tiles.index(slot * WARPGROUPS + i).reshape([64 // PACK, PACK, HEAD_SIZE]),
                    )  # fmt: skip
            column = head // GROUP * VALUE_STRIDE
            tiles = end_tile - first_tile
            position = (end_tile - 1) * BLOCK_N
            for i in range(tiles):
                stage = step % STAGES
                zero_below = low - position
                zero_from = num_keys - position
                # Boxes that reach out of the sequence: of its last tile, and of the first one in a window.
                ragged = (position + BLOCK_N >= high) & ((high + BOX - 1) // BOX * BOX > num_keys)
                if window_left is not None:
                    ragged = ragged | ((position <= low) & (low % BOX != 0))
                ahead = boxes
                if i + 1 < tiles:
                    ahead = tile_rows(
                        table, position - BLOCK_N, low, high, base, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
                    )
                elif turn + 1 < turns:
                    first_row, head, table, low, high, num_keys, base, first_tile, end_tile, ahead = _next_item(
                        turn + 1, items, item_full, item_empty, block_tables, table_stride, window_left, window_right,
                        VALUE_ROW, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED,
                    )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                if ragged:
                    mbarrier.expect(v_raw, BLOCK_N * HEAD_SIZE * 2)
                    for j in gl.static_range(BLOCK_N // BOX):
                        tma.async_copy_global_to_shared(
                            value_cache, [box_row(boxes, j), column], v_raw, v_tiles.index(stage).slice(j * BOX, BOX)
                        )
                    mbarrier.wait(v_raw, raw_phase)
                    raw_phase ^= 1
                    zero_outside(v_tiles.index(stage), zero_below, zero_from, BLOCK_N, HEAD_SIZE)
                    fence_async_shared()
                    mbarrier.arrive(v_full.index(stage), count=1)
                else:
                    mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_SIZE * 2)
                    for j in gl.static_range(BLOCK_N // BOX):
                        tma.async_copy_global_to_shared(
                            value_cache, [box_row(boxes, j), column], v_full.index(stage),
                            v_tiles.index(stage).slice(j * BOX, BOX),
                        )  # fmt: skip
                boxes = ahead
                position -= BLOCK_N
                step += 1


@gluon.jit
def _next_item(
    turn, items, item_full, item_empty, block_tables, table_stride, window_left, window_right,
    BASE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """The work item of a turn: (query row, head, table, low, high, keys, base row, first tile, end tile, boxes)."""
    first_row, tokens, first_pos, num_keys, head, seq, first_key = read_item(items, item_full, item_empty, turn)
    low, high = key_span(first_pos, first_pos + tokens - 1, num_keys, window_left, window_right)
    first_tile = low // BLOCK_N
    end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
    base = first_key + BASE
    table = first_key
    if PAGED:
        table = block_tables + seq.to(gl.int64) * table_stride
    boxes = tile_rows(table, (end_tile - 1) * BLOCK_N, low, high, base, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED)
    return first_row, head, table, low, high, num_keys, base, first_tile, end_tile, boxes
