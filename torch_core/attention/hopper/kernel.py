"""Attention for long queries on Hopper: copies, products and softmax of a program overlap, in specialised warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.attention.hopper.loads import load_keys, load_queries_and_values
from torch_core.attention.hopper.rows import attend_rows, zero_padding
from torch_core.device.hopper_items import ITEMS, find_items
from torch_core.device.hopper_work import count_tiles

__all__ = ["hopper_prefill_kernel"]


@gluon.jit
def hopper_prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    key_start_loc,
    sinks,
    out,
    lse,
    num_tokens,
    num_seqs,
    table_stride,
    table_tokens,
    scale,
    out_factor,
    window_left,
    window_right,
    NUM_HEADS: gl.constexpr,
    HEADS_TOGETHER: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    OVERLAP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    PAGED: gl.constexpr,
    MIN_QUERY: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
    VALUE_STRIDE: gl.constexpr,
    VALUE_ROW: gl.constexpr,
    OUT_TOKEN_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
):
    """A program of a persistent grid: two or three warpgroups of 64 query rows, two warps that load for them, and one
    that finds their work.

    A work item is a tile of 64 * WARPGROUPS query rows of a sequence: tokens of one head, or, where queries are short,
    PACK heads of one key/value head side by side (row = token * PACK + head), which share its keys; `work_item` says
    which ones a program takes. The warps that load fill rings of tiles in shared memory, also ahead into the next item;
    barriers in shared memory say which slots are full and which are free again. Values that no key of the sequence owns
    are zeroed there. The warpgroups multiply in turns, so that one does its softmax while another one multiplies
    (FlashAttention-3, arXiv 2407.08608); they go from the last key to the first, the tiles at the mask's edge apart
    from the others.

    The copy engine sees arrays as matrices: row `token` and column `head * stride` of query and dense keys; row
    `block * BLOCK_ROWS + token` (VALUE_ROW more for values of a combined cache) of a paged cache. With PACK, it sees
    the query as [token, head, element], and PACK heads of 64 // PACK tokens are the rows of a warpgroup.
    """
    TOKENS: gl.constexpr = 64 * WARPGROUPS // PACK
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [QUERY_STAGES * WARPGROUPS, 64, HEAD_SIZE], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    items = gl.allocate_shared_memory(gl.int32, [ITEMS, 8], words)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    item_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], barrier)
    item_empty = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_raw = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for i in gl.static_range(ITEMS):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=WARPGROUPS + 2)
    for i in gl.static_range(QUERY_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_raw, count=1)
    num_items = count_tiles(query_start_loc, num_seqs, TOKENS, MIN_QUERY) * (NUM_HEADS // PACK)
    # The language has no starred arguments, and no sums of tuples that hold None.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
                    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, OVERLAP, NUM_HEADS, PACK,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE,
                )),
                (attend_rows, (
                    1, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
                    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, OVERLAP, NUM_HEADS, PACK,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE,
                )),
                (load_keys, (
                    key_cache, k_tiles, items, item_full, item_empty, k_full, k_empty, block_tables, table_stride,
                    window_left, window_right, num_items, GROUP, BLOCK_N, HEAD_SIZE, STAGES, BLOCK_SIZE, BLOCK_ROWS,
                    BOX, PAGED, KEY_STRIDE,
                )),
                (load_queries_and_values, (
                    query, value_cache, q_tiles, v_tiles, items, item_full, item_empty, q_full, q_empty, v_full,
                    v_empty, v_raw, block_tables, table_stride, window_left, window_right, num_items, GROUP, PACK,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED, QUERY_STAGES,
                    QUERY_STRIDE, VALUE_ROW, VALUE_STRIDE,
                )),
                (find_items, (
                    items, item_full, item_empty, seq_lens, query_start_loc, key_start_loc, num_seqs, table_tokens,
                    num_items, NUM_HEADS, HEADS_TOGETHER, PACK, MIN_QUERY, WARPGROUPS, PAGED,
                )),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
                    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, OVERLAP, NUM_HEADS, PACK,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE,
                )),
                (attend_rows, (
                    1, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
                    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, OVERLAP, NUM_HEADS, PACK,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE,
                )),
                (attend_rows, (
                    2, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
                    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, OVERLAP, NUM_HEADS, PACK,
                    OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE,
                )),
                (load_keys, (
                    key_cache, k_tiles, items, item_full, item_empty, k_full, k_empty, block_tables, table_stride,
                    window_left, window_right, num_items, GROUP, BLOCK_N, HEAD_SIZE, STAGES, BLOCK_SIZE, BLOCK_ROWS,
                    BOX, PAGED, KEY_STRIDE,
                )),
                (load_queries_and_values, (
                    query, value_cache, q_tiles, v_tiles, items, item_full, item_empty, q_full, q_empty, v_full,
                    v_empty, v_raw, block_tables, table_stride, window_left, window_right, num_items, GROUP, PACK,
                    WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, BLOCK_SIZE, BLOCK_ROWS, BOX, PAGED, QUERY_STAGES,
                    QUERY_STRIDE, VALUE_ROW, VALUE_STRIDE,
                )),
                (find_items, (
                    items, item_full, item_empty, seq_lens, query_start_loc, key_start_loc, num_seqs, table_tokens,
                    num_items, NUM_HEADS, HEADS_TOGETHER, PACK, MIN_QUERY, WARPGROUPS, PAGED,
                )),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    zero_padding(
        out, lse, query_start_loc, num_seqs, num_tokens, NUM_HEADS, HEAD_SIZE, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE
    )
