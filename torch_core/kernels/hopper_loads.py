"""The warps of the Hopper prefill kernel that load: query, key and value tiles, by the copy engine."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_core.kernels.hopper_work import box_row, key_span, tile_rows, work_item, zero_outside

__all__ = ["load_queries_and_keys", "load_values"]


@gluon.jit
def load_queries_and_keys(
    query, key_cache, q_tiles, info, k_tiles, q_full, q_empty, k_full, k_empty,
    block_tables, seq_lens, query_start_loc, key_start_loc, num_seqs, table_stride, table_tokens, window_left,
    window_right, num_items,
    NUM_HEADS: gl.constexpr, HEADS_TOGETHER: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
    MIN_QUERY: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr, PAGED: gl.constexpr,
    QUERY_STAGES: gl.constexpr, QUERY_STRIDE: gl.constexpr, KEY_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the query tile of each work item and its key tiles, last keys first."""
    ROWS: gl.constexpr = 64 * WARPGROUPS
    TOKENS: gl.constexpr = ROWS // PACK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    programs = gl.num_programs(0)
    step = 0
    for turn in range((num_items + programs - 1) // programs):
        item, seq, token, head = work_item(
            turn, query_start_loc, seq_lens, key_start_loc, num_seqs, num_items, NUM_HEADS // PACK, HEADS_TOGETHER,
            TOKENS, MIN_QUERY, PAGED, PACK > 1,
        )  # fmt: skip
        head *= PACK
        if item < num_items:
            first_row, tokens, first_pos, num_keys, low, high, table, first_key = _sequence(
                seq, token, block_tables, seq_lens, query_start_loc, key_start_loc, table_stride, table_tokens,
                window_left, window_right, TOKENS, PAGED,
            )  # fmt: skip
            slot = turn % QUERY_STAGES
            mbarrier.wait(q_empty.index(slot), ((turn // QUERY_STAGES) & 1) ^ 1)
            values = gl.where(fields == 0, first_row, gl.where(fields == 1, tokens, first_pos))
            values = gl.where(fields == 3, num_keys, gl.where(fields == 4, head, values))
            info.index(slot).store(values)
            mbarrier.expect(q_full.index(slot), ROWS * HEAD_SIZE * 2)
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
            column = head // GROUP * KEY_STRIDE
            first_tile = low // BLOCK_N
            end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
            boxes = tile_rows(
                table, (end_tile - 1) * BLOCK_N, low, high, first_key, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
            )
            for i in range(end_tile - first_tile):
                position = (end_tile - 1 - i) * BLOCK_N
                stage = step % STAGES
                # The table is read one tile ahead, while this one waits for its slot.
                ahead = tile_rows(
                    table, position - BLOCK_N, low, high, first_key, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
                )
                mbarrier.wait(k_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_SIZE * 2)
                for j in gl.static_range(BLOCK_N // BOX):
                    tma.async_copy_global_to_shared(
                        key_cache, [box_row(boxes, j), column], k_full.index(stage),
                        k_tiles.index(stage).slice(j * BOX, BOX),
                    )  # fmt: skip
                boxes = ahead
                step += 1


@gluon.jit
def load_values(
    value_cache, v_tiles, v_full, v_empty, v_raw,
    block_tables, seq_lens, query_start_loc, key_start_loc, num_seqs, table_stride, table_tokens, window_left,
    window_right, num_items,
    NUM_HEADS: gl.constexpr, HEADS_TOGETHER: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
    MIN_QUERY: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr, BOX: gl.constexpr, PAGED: gl.constexpr,
    VALUE_ROW: gl.constexpr, VALUE_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warp: copies the value tiles of each work item, and zeros what no key of the sequence owns."""
    TOKENS: gl.constexpr = 64 * WARPGROUPS // PACK
    programs = gl.num_programs(0)
    step = 0
    raw_phase = 0
    for turn in range((num_items + programs - 1) // programs):
        item, seq, token, head = work_item(
            turn, query_start_loc, seq_lens, key_start_loc, num_seqs, num_items, NUM_HEADS // PACK, HEADS_TOGETHER,
            TOKENS, MIN_QUERY, PAGED, PACK > 1,
        )  # fmt: skip
        head *= PACK
        if item < num_items:
            _, _, _, num_keys, low, high, table, first_key = _sequence(
                seq, token, block_tables, seq_lens, query_start_loc, key_start_loc, table_stride, table_tokens,
                window_left, window_right, TOKENS, PAGED,
            )  # fmt: skip
            column = head // GROUP * VALUE_STRIDE
            base = first_key + VALUE_ROW
            first_tile = low // BLOCK_N
            end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
            boxes = tile_rows(
                table, (end_tile - 1) * BLOCK_N, low, high, base, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
            )
            for i in range(end_tile - first_tile):
                position = (end_tile - 1 - i) * BLOCK_N
                stage = step % STAGES
                ahead = tile_rows(
                    table, position - BLOCK_N, low, high, base, BLOCK_N, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED
                )
                mbarrier.wait(v_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                # Boxes that reach out of the sequence: of its last tile, and of the first one in a window.
                ragged = (position + BLOCK_N >= high) & ((high + BOX - 1) // BOX * BOX > num_keys)
                if window_left is not None:
                    ragged = ragged | ((position <= low) & (low % BOX != 0))
                if ragged:
                    mbarrier.expect(v_raw, BLOCK_N * HEAD_SIZE * 2)
                    for j in gl.static_range(BLOCK_N // BOX):
                        tma.async_copy_global_to_shared(
                            value_cache, [box_row(boxes, j), column], v_raw, v_tiles.index(stage).slice(j * BOX, BOX)
                        )
                    mbarrier.wait(v_raw, raw_phase)
                    raw_phase ^= 1
                    zero_outside(v_tiles.index(stage), low - position, num_keys - position, BLOCK_N, HEAD_SIZE)
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
                step += 1


@gluon.jit
def _sequence(
    seq, token, block_tables, seq_lens, query_start_loc, key_start_loc, table_stride, table_tokens,
    window_left, window_right, TOKENS: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Where a tile stands: (first token, tokens, first position, keys, low key, high key, table, first key row)."""
    start = gl.load(query_start_loc + seq)
    query_len = gl.load(query_start_loc + seq + 1) - start
    if PAGED:
        seq_len = gl.load(seq_lens + seq)
        num_keys = gl.minimum(seq_len, table_tokens)
        table = block_tables + seq.to(gl.int64) * table_stride
        first_key = 0
    else:
        first_key = gl.load(key_start_loc + seq)
        seq_len = gl.load(key_start_loc + seq + 1) - first_key
        num_keys = seq_len
        table = query_start_loc
    tokens = gl.minimum(query_len - token, TOKENS)
    first_pos = seq_len - query_len + token
    low, high = key_span(first_pos, first_pos + tokens - 1, num_keys, window_left, window_right)
    return start + token, tokens, first_pos, num_keys, low, high, table, first_key
