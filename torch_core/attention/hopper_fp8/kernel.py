"""Attention for long e4m3 queries over an e4m3 cache on Hopper: both products run at the rate of 8-bit numbers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.attention.hopper.rows import zero_padding
from torch_core.attention.hopper_fp8.loads import load_fp8_queries_and_keys, load_fp8_values
from torch_core.attention.hopper_fp8.rows import attend_fp8_rows
from torch_core.attention.hopper_fp8.transpose import transpose_values
from torch_core.device.hopper_work import count_tiles

__all__ = ["hopper_fp8_prefill_kernel"]


@gluon.jit
def hopper_fp8_prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    sinks,
    q_scale,
    k_scale,
    v_scale,
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
    HEAD_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    TRANSPOSER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    PROMOTE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    MIN_QUERY: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
    VALUE_STRIDE: gl.constexpr,
    VALUE_ROW: gl.constexpr,
    OUT_TOKEN_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
):
    """A program of a persistent grid: two warpgroups of 64 query rows, one that transposes values, two warps that load.

    The design is that of `hopper_prefill_kernel`, with what 8-bit products ask for (FlashAttention-3's fp8 forward,
    arXiv 2407.08608): the matrix units take values with adjacent keys only, so a warpgroup transposes every tile of
    them, and puts the keys into the order in which the multiplying threads hold their weights. Weights are scaled by
    2**8 and rounded to e4m3; their sums are not rounded.

    Hopper's matrix units keep about 14 bits of the sums of 8-bit products. With PROMOTE the sums of each tile of 128
    values are added up in float32; without it, long rows lose more.

    `q_scale`, `k_scale` and `v_scale` are the scales that are arrays; `scale` and `out_factor` hold those that are
    numbers. The product of all that multiplies scores is positive: the maximum of a row is sought before it.

    The copy engine sees arrays as matrices of bytes, as `hopper_prefill_kernel` says.
    """
    WARPGROUPS: gl.constexpr = 2
    BLOCK_N: gl.constexpr = 128
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=HEAD_SIZE, element_bitwidth=8, rank=2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [QUERY_STAGES * WARPGROUPS, 64, HEAD_SIZE], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    raw_tiles = gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, HEAD_SIZE], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, HEAD_SIZE, BLOCK_N], v_layout)
    info_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    info = gl.allocate_shared_memory(gl.int32, [QUERY_STAGES, 8], info_layout)
    bounds = gl.allocate_shared_memory(gl.int32, [RAW_STAGES, 8], info_layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], barrier)
    raw_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(QUERY_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(RAW_STAGES):
        mbarrier.init(raw_full.index(i), count=1)
        mbarrier.init(raw_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    num_items = count_tiles(query_start_loc, num_seqs, 64 * WARPGROUPS, MIN_QUERY) * NUM_HEADS
    gl.warp_specialize(
        [
            (attend_fp8_rows, (
                0, sinks, q_scale, k_scale, v_scale, out, lse, scale, out_factor, window_left, window_right, num_items,
                q_tiles, info, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, WARPGROUPS,
                HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, PROMOTE, NUM_HEADS, OUT_TOKEN_STRIDE,
                OUT_HEAD_STRIDE,
            )),
            (attend_fp8_rows, (
                1, sinks, q_scale, k_scale, v_scale, out, lse, scale, out_factor, window_left, window_right, num_items,
                q_tiles, info, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, WARPGROUPS,
                HEAD_SIZE, STAGES, QUERY_STAGES, PING_PONG, PROMOTE, NUM_HEADS, OUT_TOKEN_STRIDE,
                OUT_HEAD_STRIDE,
            )),
            (transpose_values, (
                raw_tiles, bounds, v_tiles, raw_full, raw_empty, v_full, v_empty, num_items, HEAD_SIZE, RAW_STAGES,
                STAGES,
            )),
            (load_fp8_queries_and_keys, (
                query, key_cache, q_tiles, info, k_tiles, q_full, q_empty, k_full, k_empty, block_tables, seq_lens,
                query_start_loc, num_seqs, table_stride, table_tokens, window_left, window_right, num_items, NUM_HEADS,
                HEADS_TOGETHER, GROUP, MIN_QUERY, WARPGROUPS, BLOCK_N, HEAD_SIZE, STAGES, BLOCK_SIZE, BLOCK_ROWS, BOX,
                QUERY_STAGES, QUERY_STRIDE, KEY_STRIDE,
            )),
            (load_fp8_values, (
                value_cache, raw_tiles, bounds, raw_full, raw_empty, block_tables, seq_lens, query_start_loc, num_seqs,
                table_stride, table_tokens, window_left, window_right, num_items, NUM_HEADS, HEADS_TOGETHER, GROUP,
                MIN_QUERY, WARPGROUPS, BLOCK_N, HEAD_SIZE, RAW_STAGES, BLOCK_SIZE, BLOCK_ROWS, BOX, VALUE_ROW,
                VALUE_STRIDE,
            )),
        ],
        [4, 4, 1, 1],
        [CONSUMER_REGISTERS, TRANSPOSER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    zero_padding(
        out, lse, query_start_loc, num_seqs, num_tokens, NUM_HEADS, HEAD_SIZE, OUT_TOKEN_STRIDE, OUT_HEAD_STRIDE
    )
