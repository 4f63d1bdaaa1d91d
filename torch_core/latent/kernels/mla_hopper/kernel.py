"""Attention to cached latents on Hopper: copies, scores and weighted sums overlap, in specialised warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.dependent import let_next_begin
from torch_core.device.hopper_latents import BLOCK_N, HALF, ROPE, Results, Sizes, find_row, find_work, zero_padding
from torch_core.device.hopper_rows import Output
from torch_core.device.hopper_turns import Ring, make_barriers, make_ring, open_slot
from torch_core.latent.kernels.mla_hopper.codes import weigh_codes
from torch_core.latent.kernels.mla_hopper.loads import CODED_SLOTS, ROPES, ROWS, SLOTS, Room, Source
from torch_core.latent.kernels.mla_hopper.warpgroups import make_weights, weigh_latents


@gluon.jit
def hopper_latent_kernel(
    query,
    query_rope,
    latent_cache,
    latent_rope,
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
    PACKED: gl.constexpr,
    OUT_STRIDES: gl.constexpr,
    SUM_REGISTERS: gl.constexpr,
    WEIGHT_REGISTERS: gl.constexpr,
):
    """A program: one chunk of a sequence's latents, with 64 of its rows (query token, head).

    The sums of 64 rows of 512 elements fill the registers of two warpgroups, half a row each; a third one multiplies
    queries and latents and takes the softmax of the next tile meanwhile. A latent is copied into shared memory once, as
    key and as value, and by the warpgroup that is done with the latents whose place it takes: of twelve warps each
    thread may have a third more registers than of thirteen. The first half of the query and its rotary part move on
    into registers, which leaves their places to half a tile more, and products read less shared memory, whose
    bandwidth limits them. The second half of a tile is weighed once half of the next scores are there: its products do
    not hold those scores up, and last into their softmax.

    With a BOX of 0 threads gather the rows of blocks of one token: the copy engine of Hopper cannot. They also gather
    the rows of 8-bit latents, of any blocks, and unpack them.

    Grid and results are those of mla.kernel. The copy engine sees the query as rows (token, head) and the cache as rows
    of BLOCK_ROWS from block to block.
    """
    if MERGED:
        let_next_begin()
    SHAPE: gl.constexpr = Sizes(
        NUM_HEADS, MAX_QUERY, CHUNK, LEAST, FEW, SHARED, BLOCK_SIZE, BLOCK_ROWS, BLOCK_N, BOX, True, OUT_STRIDES
    )
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    CODED: gl.constexpr = BOX == 0 and latent_cache.dtype.element_ty.primitive_bitwidth == 8
    NUM_SLOTS: gl.constexpr = CODED_SLOTS if CODED else SLOTS
    NUM_ROPES: gl.constexpr = 2 if CODED and not PACKED else ROPES
    if MAX_QUERY == 1:
        work = find_row(
            query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, num_tokens, ROW_TILES, SHAPE, ROWS
        )
    else:
        work = find_work(query_start_loc, seq_lens, num_seqs, table_tokens, max_chunks, ROW_TILES, SHAPE, ROWS)
    if k_scale is not None:
        stored = gl.load(k_scale)
        scale *= stored
        out_factor *= stored
    output = Output(sinks, out, lse, out_factor)
    if work.live:
        if work.first_row < work.query_len * NUM_HEADS:
            k_tiles = gl.allocate_shared_memory(dtype, [NUM_SLOTS, BLOCK_N, HALF], layout)
            k_rope = gl.allocate_shared_memory(dtype, [NUM_ROPES, BLOCK_N, ROPE], layout)
            p_tile = gl.allocate_shared_memory(dtype, [ROWS, BLOCK_N], layout)
            factors = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
            query_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
            query_read = gl.allocate_shared_memory(gl.int64, [1], barrier)
            raw, codes, scales, rope_codes = None, None, None, None
            if BOX > 0 or CODED:
                raw = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
                for i in gl.static_range(2):
                    mbarrier.init(raw.index(i), count=128 if CODED else 1)
            if CODED:
                narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
                plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
                codes = gl.allocate_shared_memory(latent_cache.dtype.element_ty, [2, BLOCK_N, HALF], narrow)
                if PACKED:
                    scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N, 4], plain)
                else:
                    rope_codes = gl.allocate_shared_memory(latent_cache.dtype.element_ty, [BLOCK_N, ROPE], plain)
            scored = None
            if not CODED:
                scored = gl.allocate_shared_memory(gl.int64, [1], barrier)
                mbarrier.init(scored, count=1)
            q_second = gl.allocate_shared_memory(dtype, [ROWS, HALF], layout)
            latents = Ring(k_tiles, make_barriers(NUM_SLOTS), None)
            weights = make_ring(p_tile, 1)
            for i in gl.static_range(NUM_SLOTS):
                # Rows are gathered by the threads of a warpgroup, each of which arrives.
                mbarrier.init(latents.full.index(i), count=128 if BOX == 0 and not CODED else 1)
            open_slot(weights, 0, 2)
            mbarrier.init(query_full, count=1)
            mbarrier.init(query_read, count=1)
            # Until they have been read, where latents will lie.
            rows = (k_tiles.index(NUM_SLOTS - 1), q_second, k_rope.index(NUM_ROPES - 1))
            room = Room(
                latents, k_rope, rows, query_full, query_read, raw, codes, scales, rope_codes, weights, factors, scored
            )  # fmt: skip
            results = Results(output, partial_out, partial_max, partial_sum)
            table = block_tables + work.seq.to(gl.int64) * table_stride
            source = Source(query, query_rope, latent_cache, latent_rope, table)
            gl.warp_specialize(
                [
                    (_weigh, (0, work, source, room, results, SHAPE)),
                    (_weigh, (1, work, source, room, results, SHAPE)),
                    (make_weights, (work, scale, window_right, room, results, SHAPE)),
                ],
                [4, 4],
                [SUM_REGISTERS, WEIGHT_REGISTERS],
            )
    else:
        zero_padding(work, output, query_start_loc, num_tokens, num_seqs, SHAPE)


@gluon.jit
def _weigh(OWN: gl.constexpr, work, source, room, results, SHAPE: gl.constexpr):
    if room.codes is None:
        weigh_latents(OWN, work, source, room, results, SHAPE)
    else:
        weigh_codes(OWN, work, source, room, results, SHAPE)
