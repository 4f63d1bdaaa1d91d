"""Gradients of attention on Hopper: a program takes a tile of keys through the queries that see it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.attention.kernels.backward_hopper.gradients import key_gradients
from torch_core.attention.kernels.backward_hopper.loads import load_tiles
from torch_core.attention.kernels.backward_hopper.queries import pass_turns, query_gradients, take_turns
from torch_core.attention.kernels.backward_hopper.wide import uneven_gradients, wide_key_gradients, wide_value_gradients
from torch_core.attention.kernels.backward_hopper.work import Gradients, Rings, Sizes, Tensors, find_item, zero_padding
from torch_core.device.hopper_turns import Ring, make_barriers, make_ring, open_slot


@gluon.jit
def hopper_backward_kernel(
    query,
    key,
    value,
    d_out,
    row_stats,
    query_start_loc,
    key_start_loc,
    turns,
    d_query,
    d_query_sums,
    d_key,
    d_value,
    num_keys,
    num_seqs,
    query_tiles,
    scale,
    window_left,
    window_right,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS_TOGETHER: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    REST_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROLE_KEYS: gl.constexpr,
    PART_WIDTH: gl.constexpr,
    IN_ORDER: gl.constexpr,
    RISES: gl.constexpr,
    QUERY_STAGES: gl.constexpr,
    D_OUT_STAGES: gl.constexpr,
    KEY_REGISTERS: gl.constexpr,
    QUERY_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    D_OUT_STRIDE: gl.constexpr,
    KEY_STRIDE: gl.constexpr,
    VALUE_STRIDE: gl.constexpr,
    D_KEY_STRIDES: gl.constexpr,
    D_VALUE_STRIDES: gl.constexpr,
    D_QUERY_STRIDES: gl.constexpr,
):
    """A program: a tile of BLOCK_N keys of a head through all queries of the group that see them.

    Two warpgroups of 64 keys each work out the gradients of keys and values, and leave score gradients in shared
    memory. From these a third one works out the queries' gradients, unless the two do (`uneven_gradients`). One warp
    loads; two keep the order in which programs add to the queries' gradients. FlashAttention-3 (arXiv 2407.08608) has a
    deterministic mode too; its warpgroups do all three.

    The compiler knows the addresses of tiles in shared memory in the first role alone; the other roles hold them in
    registers. Two warpgroups that are one role spill less, but keep in step. Keys are the rows of scores: weights leave
    the matrix units as the left operand of the next product. A group's gradients of keys and values are summed in
    registers.
    """
    SHAPE: gl.constexpr = Sizes(
        NUM_KV_HEADS, GROUP, HEADS_TOGETHER, HEAD_SIZE, VALUE_SIZE, REST_SIZE, BLOCK_M, BLOCK_N, ROLE_KEYS,
        PART_WIDTH, 2 if REST_SIZE else 1, IN_ORDER, RISES, window_left is not None, QUERY_STRIDE, D_OUT_STRIDE,
        KEY_STRIDE, VALUE_STRIDE, D_KEY_STRIDES, D_VALUE_STRIDES, D_QUERY_STRIDES,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    item = find_item(query_start_loc, key_start_loc, num_seqs, window_left, window_right, SHAPE)
    gradients = Gradients(d_query_sums, turns, d_key, d_value, d_query, scale, query_tiles)
    if item.live:
        k_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, HEAD_SIZE - REST_SIZE], layout)
        v_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, VALUE_SIZE], layout)
        q_tiles = gl.allocate_shared_memory(dtype, [QUERY_STAGES, BLOCK_M, HEAD_SIZE - REST_SIZE], layout)
        do_tiles = gl.allocate_shared_memory(dtype, [D_OUT_STAGES, BLOCK_M, VALUE_SIZE], layout)
        ds_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], layout)
        k_rest = None
        q_rest = None
        if REST_SIZE:
            k_rest = gl.allocate_shared_memory(dtype, [BLOCK_N, REST_SIZE], layout)
            q_rest = gl.allocate_shared_memory(dtype, [QUERY_STAGES, BLOCK_M, REST_SIZE], layout)
        weights = None
        if BLOCK_N == 64:
            pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
            weights = gl.allocate_shared_memory(gl.int32, [QUERY_STAGES, BLOCK_N, BLOCK_M // 2], pairs)
        READERS: gl.constexpr = 2 if BLOCK_N == 64 else BLOCK_N // ROLE_KEYS
        stats = gl.allocate_shared_memory(gl.float32, [QUERY_STAGES, 2 * BLOCK_M], row_stats.layout)
        keys = Ring(k_tile, make_barriers(1), None)
        values = Ring(v_tile, make_barriers(1), None)
        queries = make_ring(q_tiles, QUERY_STAGES)
        d_outs = make_ring(do_tiles, D_OUT_STAGES)
        raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        open_slot(keys, 0)
        open_slot(values, 0)
        for i in gl.static_range(QUERY_STAGES):
            open_slot(queries, i, READERS)
        for i in gl.static_range(D_OUT_STAGES):
            open_slot(d_outs, i, READERS)
        mbarrier.init(raw, count=1)
        rings = Rings(keys, values, queries, d_outs, ds_tiles, weights, k_rest, q_rest, stats, raw)
        tensors = Tensors(query, key, value, d_out, row_stats)
        if REST_SIZE:
            gl.warp_specialize(
                [
                    (uneven_gradients, (item, rings, gradients, SHAPE)),
                    (load_tiles, (item, tensors, rings, query_tiles, SHAPE)),
                    (take_turns, (item, gradients, SHAPE)),
                    (pass_turns, (item, gradients, SHAPE)),
                ],
                [1, 1, 1],
                [LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
            )
        elif ROLE_KEYS == 128:
            gl.warp_specialize(
                [
                    (key_gradients, (0, item, rings, gradients, SHAPE)),
                    (query_gradients, (item, rings, gradients, SHAPE)),
                    (load_tiles, (item, tensors, rings, query_tiles, SHAPE)),
                    (take_turns, (item, gradients, SHAPE)),
                    (pass_turns, (item, gradients, SHAPE)),
                ],
                [4, 1, 1, 1],
                [QUERY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_sum_gradients, (0, item, rings, gradients, SHAPE)),
                    (_sum_gradients, (1, item, rings, gradients, SHAPE)),
                    (query_gradients, (item, rings, gradients, SHAPE)),
                    (load_tiles, (item, tensors, rings, query_tiles, SHAPE)),
                    (take_turns, (item, gradients, SHAPE)),
                    (pass_turns, (item, gradients, SHAPE)),
                ],
                [4, 4, 1, 1, 1],
                [KEY_REGISTERS, QUERY_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
            )
    else:
        zero_padding(item, gradients, key_start_loc, num_keys, num_seqs, SHAPE)


@gluon.jit
def _sum_gradients(OWN: gl.constexpr, item, rings, gradients, SHAPE: gl.constexpr):
    """One of two roles for the gradients of keys and values: of its half of the keys, or one each."""
    if rings.weights is None:
        key_gradients(OWN, item, rings, gradients, SHAPE)
    elif OWN == 0:
        wide_value_gradients(item, rings, gradients, SHAPE)
    else:
        wide_key_gradients(item, rings, gradients, SHAPE)
