"""Attention of few query rows to e4m3 latents on Hopper: queries are the columns of the products.

With keys as the rows of a product, 16 query rows take a quarter of the tensor cores' time that a tile of 64 takes, and
an operand of it may come from registers: there latents are converted, once, on their way to both products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.attention.mla_few.warpgroups import attend
from torch_core.attention.mla_few.work import BLOCK_N, CHUNKS, COLUMNS, PART, Results, Room, Source
from torch_core.attention.mla_hopper.work import Sizes, find_work, zero_padding
from torch_core.device.hopper_rows import Output

__all__ = ["few_latent_kernel"]


@gluon.jit
def few_latent_kernel(
    query,
    latent_cache,
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
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BOX: gl.constexpr,
    QUERY_STRIDES: gl.constexpr,
    OUT_STRIDES: gl.constexpr,
):
    """A program: one chunk of a sequence's latents, with 16 of its rows (query token, head).

    Two warpgroups take every other tile, each with a softmax of its own; they are merged at the end. Grid and results
    are those of mla.kernel. The copy engine sees the cache as rows of BLOCK_ROWS from block to block.
    """
    SHAPE: gl.constexpr = Sizes(NUM_HEADS, MAX_QUERY, CHUNK, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N, BOX, True, OUT_STRIDES)
    dtype: gl.constexpr = query.dtype.element_ty
    # One instruction makes two float16 of e4m3, and four make two bfloat16; packed rows are rounded to theirs anyway.
    multiplied: gl.constexpr = gl.float16 if packed is None else dtype
    PARTS: gl.constexpr = CHUNKS if packed is None else CHUNKS - 1
    codes_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    work = find_work(query_start_loc, seq_lens, num_seqs, table_tokens, ROW_TILES, SHAPE, COLUMNS)
    if k_scale is not None:
        stored = gl.load(k_scale)
        scale *= stored
        out_factor *= stored
    output = Output(sinks, out, lse, out_factor)
    if work.live:
        if work.first_row < work.query_len * NUM_HEADS:
            codes = gl.allocate_shared_memory(latent_cache.dtype, [2 * PARTS, BLOCK_N, PART], codes_layout)
            values = gl.allocate_shared_memory(multiplied, [2, BLOCK_N, 512], layout)
            rows = gl.allocate_shared_memory(multiplied, [CHUNKS, COLUMNS, PART], layout)
            weights = gl.allocate_shared_memory(multiplied, [2, BLOCK_N, COLUMNS], p_layout)
            states = gl.allocate_shared_memory(gl.float32, [3, COLUMNS], plain)
            full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
            other = gl.allocate_shared_memory(gl.int64, [1], barrier)
            for i in gl.static_range(2):
                mbarrier.init(full.index(i), count=1)
            mbarrier.init(other, count=1)
            _load_query(query, work, rows, states.index(2), QUERY_STRIDES, SHAPE)
            fence_async_shared()
            room = Room(codes, values, rows, weights, states, full, other)
            results = Results(output, partial_out, partial_max, partial_sum, max_chunks)
            source = Source(latent_cache, packed, block_tables + work.seq.to(gl.int64) * table_stride)
            gl.warp_specialize(
                [
                    (attend, (0, work, scale, window_right, source, room, results, SHAPE)),
                    (attend, (1, work, scale, window_right, source, room, results, SHAPE)),
                ],
                [4],
                [240],
            )
    else:
        zero_padding(work, output, query_start_loc, num_tokens, num_seqs, SHAPE)


@gluon.jit
def _load_query(query, work, room, factors, STRIDES: gl.constexpr, SHAPE: gl.constexpr):
    """Lays the rows of the query into shared memory, their elements in the order of `attend`'s products."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows = work.first_row + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    tokens = rows // SHAPE.NUM_HEADS
    place = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    # Of four threads each has 16 elements of a row that lie together, and gives four of them to a product of 16.
    element = place // 2 % 4 * 16 + place // 16 * 4 + place // 8 % 2 * 2 + place % 2
    offsets = (work.query_start + tokens).to(gl.int64) * STRIDES[0] + rows % SHAPE.NUM_HEADS * STRIDES[1]
    live = (tokens < work.query_len)[:, None] & (element >= 0)[None, :]
    pointers = query + offsets[:, None] + element[None, :]
    factor = gl.full([COLUMNS], 1.0, gl.float32, gl.SliceLayout(1, layout))
    if room.dtype != query.dtype.element_ty:
        # A power of two, so that nothing but elements 2^-34 as large as the largest is rounded.
        peak = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(1, layout))
        for i in gl.static_range(CHUNKS):
            found = gl.load(pointers + i * PART, mask=live, other=0.0).to(gl.float32)
            peak = gl.maximum(peak, gl.max(gl.maximum(found, -found), 1))
        factor = gl.where(peak > 0.0, gl.exp2(10.0 - gl.floor(gl.log2(peak))), factor)
    for i in gl.static_range(CHUNKS):
        found = gl.load(pointers + i * PART, mask=live, other=0.0).to(gl.float32)
        room.index(i).store((found * factor[:, None]).to(room.dtype))
    factors.store(1.0 / factor)
