"""Attention of few query rows to e4m3 latents on Hopper: queries are the columns of the products.

With keys as the rows of a product, 16 query rows take a quarter of the tensor cores' time that a tile of 64 takes.
Scores are products of e4m3: a bfloat16 query is the sum of two e4m3 terms, one of float16 of four, which are columns of
their own. Only for the weighted sums are latents converted, to float16 and in registers, on their way to the product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.dependent import let_next_begin
from torch_core.device.hopper_latents import BLOCK_N, ROPE, Results, Sizes, find_row, find_work, zero_padding
from torch_core.device.hopper_rows import Output
from torch_core.latent.kernels.mla_few.loads import COLUMNS, GROUP, GROUPS, Room, Source
from torch_core.latent.kernels.mla_few.warpgroups import attend


@gluon.jit
def few_latent_kernel(
    query,
    latent_cache,
    latent_rope,
    packed,
    block_tables,
    seq_lens,
    query_start_loc,
    sinks,
    k_scale,
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
    window_right,
    max_chunks,
    NUM_HEADS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    MAX_QUERY: gl.constexpr,
    CHUNK: gl.constexpr,
    LEAST: gl.constexpr,
    FEW: gl.constexpr,
    SHARED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    MERGED: gl.constexpr,
    QUERY_STRIDES: gl.constexpr,
    OUT_STRIDES: gl.constexpr,
    TERMS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """A program: one chunk of a sequence's latents, with 16 of its rows (query token, head).

    Two warpgroups take every other tile, each with a softmax of its own; they are merged at the end. Grid and results
    are those of mla.kernel. The copy engine sees the cache as rows of BLOCK_ROWS from block to block;
    with a BOX of 0 blocks have one token, and threads gather their packed rows.
    """
    if MERGED:
        let_next_begin()
    SHAPE: gl.constexpr = Sizes(
        NUM_HEADS, MAX_QUERY, CHUNK, LEAST, FEW, SHARED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N, BOX, True, OUT_STRIDES
    )
    e4m3: gl.constexpr = gl.float8e4nv
    # Rotary keys of packed rows are bfloat16.
    WIDE: gl.constexpr = packed is not None
    rope: gl.constexpr = gl.bfloat16 if WIDE else e4m3
    ROPE_TERMS: gl.constexpr = TERMS // 2 if WIDE else TERMS
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if WIDE else narrow
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = latent_cache.dtype.element_ty if BOX == 0 else latent_cache.dtype
    if BOX == 0:
        work = find_row(
            query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, num_tokens, ROW_TILES, SHAPE, COLUMNS
        )
    else:
        work = find_work(query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, ROW_TILES, SHAPE, COLUMNS)
    if k_scale is not None:
        stored = gl.load(k_scale)
        scale *= stored
        out_factor *= stored
    output = Output(sinks, out, lse, out_factor)
    if work.live:
        if work.first_row < work.query_len * NUM_HEADS:
            codes = gl.allocate_shared_memory(dtype, [GROUPS * SLOTS, BLOCK_N, GROUP], layout)
            ropes = gl.allocate_shared_memory(
                dtype, [SLOTS, BLOCK_N, GROUP if WIDE else ROPE], layout if WIDE else narrow
            )
            rows = gl.allocate_shared_memory(e4m3, [GROUPS, TERMS * COLUMNS, GROUP], layout)
            rows_rope = gl.allocate_shared_memory(rope, [ROPE_TERMS * COLUMNS, ROPE], rope_layout)
            weights = gl.allocate_shared_memory(gl.float16, [2 * (GROUPS if WIDE else 1), BLOCK_N, COLUMNS], p_layout)
            states = gl.allocate_shared_memory(gl.float32, [3, COLUMNS], plain)
            full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
            ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
            other = gl.allocate_shared_memory(gl.int64, [1], barrier)
            for i in gl.static_range(SLOTS):
                # Rows are gathered by the threads of a warpgroup, each of which arrives.
                mbarrier.init(full.index(i), count=128 if BOX == 0 else 1)
            mbarrier.init(ready, count=1)
            mbarrier.init(other, count=1)
            room = Room(codes, ropes, rows, rows_rope, weights, states, full, ready, other)
            results = Results(output, partial_out, partial_max, partial_sum)
            table = block_tables + work.seq.to(gl.int64) * table_stride
            source = Source(query, latent_cache, latent_rope, packed, table)
            gl.warp_specialize(
                [
                    (attend, (0, work, scale, window_right, source, room, results, QUERY_STRIDES, SHAPE)),
                    (attend, (1, work, scale, window_right, source, room, results, QUERY_STRIDES, SHAPE)),
                ],
                [4],
                [240],
            )
    else:
        zero_padding(work, output, query_start_loc, num_tokens, num_seqs, SHAPE)
