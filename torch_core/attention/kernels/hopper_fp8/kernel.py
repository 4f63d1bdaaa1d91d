"""Attention for long e4m3 queries over an e4m3 cache on Hopper: both products run at the rate of 8-bit numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.attention.kernels.hopper_fp8.loads import load_fp8_keys, load_fp8_queries_and_values
from torch_core.attention.kernels.hopper_fp8.rows import Scales, attend_fp8_rows
from torch_core.attention.kernels.hopper_fp8.transpose import transpose_values
from torch_core.device.hopper_call import Batch, Call, Shape, Split
from torch_core.device.hopper_rows import Output, zero_padding
from torch_core.device.hopper_turns import make_ring, open_slot
from torch_core.device.hopper_work import count_items
from torch_core.device.mask import Bounds


class _Rings(NamedTuple):
    """The shared memory of a program: rings of tiles."""

    query: Any  # query, key: tiles that the copy engine brings.
    told: Any  # Where the query tile of each slot stands.
    key: Any
    raw: Any  # Values as they lie in the cache.
    raw_bounds: Any  # Which rows of each of their slots are keys of the sequence.
    value: Any  # Values transposed.


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
    partial_out,
    partial_max,
    partial_sum,
    num_tokens,
    num_seqs,
    table_stride,
    table_tokens,
    scale,
    out_factor,
    window_left,
    window_right,
    chunk,
    max_chunks,
    max_query,
    NUM_HEADS: gl.constexpr,
    HEADS_TOGETHER: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    TRANSPOSER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    TRANSPOSER_WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    MIN_QUERY: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
    VALUE_STRIDE: gl.constexpr,
    VALUE_ROW: gl.constexpr,
    OUT_STRIDES: gl.constexpr,
):
    """A program of a persistent grid: two or three warpgroups of 64 query rows, warps that transpose values, and two
    that load.

    The design is that of `hopper_prefill_kernel`, changed for 8-bit products (FlashAttention-3's fp8 forward,
    arXiv 2407.08608): the matrix units take values with adjacent keys only, so some warps transpose every tile of
    them, and put the keys into the order in which the multiplying threads hold their weights. Weights are scaled so
    that they begin at 2**4 and rounded to e4m3; their sums are not rounded.

    Hopper's matrix units keep about 14 bits of the sums of 8-bit products.

    `q_scale`, `k_scale` and `v_scale` are the scales that are arrays; `scale` and `out_factor` hold those that are
    numbers. The product of all that multiplies scores is positive: the maximum of a row is sought before it.

    The copy engine sees arrays as matrices of bytes; PACK and `chunk` are as in `hopper_prefill_kernel`.
    """
    BLOCK_N: gl.constexpr = 128
    SHAPE: gl.constexpr = Shape(
        NUM_HEADS, GROUP, PACK, HEADS_TOGETHER, HEAD_SIZE, 0, WARPGROUPS, False, BLOCK_N, MIN_QUERY, True, BLOCK_SIZE,
        BLOCK_ROWS, BOX, QUERY_STRIDE, KEY_STRIDE, VALUE_STRIDE, VALUE_ROW, OUT_STRIDES,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64 if HEAD_SIZE == 64 else 128, element_bitwidth=8, rank=2
    )
    v_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_tiles = gl.allocate_shared_memory(dtype, [QUERY_STAGES * WARPGROUPS, 64, HEAD_SIZE], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    raw_tiles = gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, HEAD_SIZE], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, HEAD_SIZE, BLOCK_N], v_layout)
    told = gl.allocate_shared_memory(gl.int32, [QUERY_STAGES, 8], words)
    raw_bounds = gl.allocate_shared_memory(gl.int32, [RAW_STAGES, 8], words)
    queries = make_ring(q_tiles, QUERY_STAGES)
    keys = make_ring(k_tiles, STAGES)
    raw = make_ring(raw_tiles, RAW_STAGES)
    values = make_ring(v_tiles, STAGES)
    for i in gl.static_range(QUERY_STAGES):
        open_slot(queries, i, WARPGROUPS)
    for i in gl.static_range(RAW_STAGES):
        open_slot(raw, i, 1)
    for i in gl.static_range(STAGES):
        open_slot(keys, i, WARPGROUPS)
    for i in gl.static_range(STAGES):
        open_slot(values, i, WARPGROUPS)
    rings = _Rings(queries, told, keys, raw, raw_bounds, values)
    batch = Batch(query_start_loc, seq_lens, None, num_seqs, block_tables, table_stride, table_tokens)
    output = Output(sinks, out, lse, out_factor)
    bounds = Bounds(window_left, window_right, None)
    split = None
    if chunk is not None:
        split = Split(chunk, max_chunks, max_query, partial_out, partial_max, partial_sum)
    num_items = count_items(batch, bounds, split, SHAPE)
    call = Call(query, key_cache, value_cache, None, None, scale, bounds, output, batch, num_items, split)
    scales = Scales(q_scale, k_scale, v_scale)
    # The language has no sums of tuples that hold None, or the lists would be one.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend_fp8_rows, (0, call, scales, rings, SHAPE, OVERLAP)),
                (attend_fp8_rows, (1, call, scales, rings, SHAPE, OVERLAP)),
                (transpose_values, (call, rings, SHAPE)),
                (load_fp8_keys, (call, rings, SHAPE)),
                (load_fp8_queries_and_values, (call, rings, SHAPE)),
            ],
            [4, TRANSPOSER_WARPS, 1, 1],
            [CONSUMER_REGISTERS, TRANSPOSER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend_fp8_rows, (0, call, scales, rings, SHAPE, OVERLAP)),
                (attend_fp8_rows, (1, call, scales, rings, SHAPE, OVERLAP)),
                (attend_fp8_rows, (2, call, scales, rings, SHAPE, OVERLAP)),
                (transpose_values, (call, rings, SHAPE)),
                (load_fp8_keys, (call, rings, SHAPE)),
                (load_fp8_queries_and_values, (call, rings, SHAPE)),
            ],
            [4, 4, TRANSPOSER_WARPS, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, TRANSPOSER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    zero_padding(output, batch, num_tokens, SHAPE)
