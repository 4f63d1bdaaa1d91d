"""The warpgroups of the Hopper backward kernel for keys wider than values: 192 elements over 128, of 128 keys.

The sums of 64 such keys take 160 registers of a thread: two warpgroups hold those of 128 keys, if there is no third. So
they add to the queries' gradients, too, and are one role: where its tiles lie takes no registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.attention.kernels.backward_hopper.gradients import FIRST, LAST, mask_edge
from torch_core.attention.kernels.backward_hopper.pairs import score_gradient_pairs, unpack_pairs, weight_pairs
from torch_core.attention.kernels.backward_hopper.queries import add_columns, query_sums
from torch_core.attention.kernels.backward_hopper.signals import await_turn, pass_turn
from torch_core.attention.kernels.backward_hopper.work import full_tiles, store_rows
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.mask import LOG2E

__all__ = ["uneven_gradients"]


@gluon.jit
def uneven_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """Two warpgroups: the tile's keys through all queries of the group that see them, the last queries first."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    GROUP: gl.constexpr = SHAPE.GROUP
    KEYS: gl.constexpr = SHAPE.BLOCK_N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = full_tiles(item, 0, KEYS, SHAPE)
    dv = _no_sums(KEYS, SHAPE.VALUE_SIZE)
    dk = _no_sums(KEYS, SHAPE.HEAD_SIZE - SHAPE.REST_SIZE)
    dk_rest = _no_sums(KEYS, SHAPE.REST_SIZE)
    sums = (dv, dk, dk_rest)
    factor = gradients.scale * LOG2E
    mbarrier.wait(rings.key.full.index(0), 0)
    mbarrier.wait(rings.value.full.index(0), 0)
    if item.end > item.start:
        # The first step finds score gradients of zero where later ones find those of the step before.
        rings.d_scores.index(1).store(gl.zeros([KEYS, BLOCK_M], rings.key.tiles.dtype, S_LAYOUT))
        fence_async_shared()
        step = 0
        if SHAPE.LEFT:
            last = gl.where(rows < item.keys, item.last + rows, -(2**30))
            for i in range((item.end - high) * GROUP):
                bound = last - (item.end - 1 - i // GROUP) * BLOCK_M
                sums = _step(sums, item, rings, gradients, step, factor, bound, LAST, SHAPE, S_LAYOUT)
                step += 1
        first = gl.where(rows < item.keys, item.first + rows, 2**30)
        for _ in range((high - low) * GROUP):
            sums = _step(sums, item, rings, gradients, step, factor, first, None, SHAPE, S_LAYOUT)
            step += 1
        for i in range((low - item.start) * GROUP):
            bound = first - (low - 1 - i // GROUP) * BLOCK_M
            sums = _step(sums, item, rings, gradients, step, factor, bound, FIRST, SHAPE, S_LAYOUT)
            step += 1
        dv, dk, dk_rest = sums
        dk, dk_rest = _add_keys(dk, dk_rest, rings, step)
        dk, dk_rest = warpgroup_mma_wait(0, deps=(dk, dk_rest))
        sums = (dv, dk, dk_rest)
    dv, dk, dk_rest = sums
    d_key = gradients.key + item.kv_head * SHAPE.D_KEY_STRIDES[1]
    d_value = gradients.value + item.kv_head * SHAPE.D_VALUE_STRIDES[1]
    store_rows(dv, d_value, item, SHAPE.D_VALUE_STRIDES[0])
    store_rows(dk * gradients.scale, d_key, item, SHAPE.D_KEY_STRIDES[0])
    store_rows(dk_rest * gradients.scale, d_key + dk.shape[1], item, SHAPE.D_KEY_STRIDES[0])


@gluon.jit
def _step(
    sums, item, rings, gradients, step, factor, bound, EDGE: gl.constexpr, SHAPE: gl.constexpr, S_LAYOUT: gl.constexpr
):  # fmt: skip
    """One tile of queries: scores and weights, keys by rows; the keys' gradient of the step before meanwhile.

    `bound` is the first or the last query that sees each key, at that EDGE of the mask.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    MAIN: gl.constexpr = SHAPE.HEAD_SIZE - SHAPE.REST_SIZE
    dtype: gl.constexpr = rings.key.tiles.dtype
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dv, dk, dk_rest = sums
    q_slot, q_phase = ring_slot(rings.query, step)
    do_slot, do_phase = ring_slot(rings.d_out, step)
    k = rings.key.tiles.index(0)
    do = rings.d_out.tiles.index(do_slot)
    stats = rings.stats.index(q_slot)
    zeros = gl.zeros([SHAPE.BLOCK_N, BLOCK_M], gl.float32, S_LAYOUT)
    mbarrier.wait(rings.query.full.index(q_slot), q_phase)
    s = warpgroup_mma(k, rings.query.tiles.index(q_slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma(rings.key_rest, rings.query_rest.index(q_slot).permute((1, 0)), s, is_async=True)
    dk, dk_rest = _add_keys(dk, dk_rest, rings, step)
    s = warpgroup_mma_wait(2, deps=(s,))
    if EDGE is not None:
        s = mask_edge(s, bound, EDGE)
    lse = stats.slice(0, BLOCK_M).load(COLUMNS)
    weights = weight_pairs(s * factor - lse[None, :], dtype)
    p = gl.convert_layout(unpack_pairs(weights, dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    mbarrier.wait(rings.d_out.full.index(do_slot), do_phase)
    dp = warpgroup_mma(rings.value.tiles.index(0), do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dk, dk_rest = warpgroup_mma_wait(1, deps=(dk, dk_rest))
    if step > 0:
        before, _ = ring_slot(rings.query, step - 1)
        mbarrier.arrive(rings.query.empty.index(before), count=1)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = stats.slice(BLOCK_M, BLOCK_M).load(COLUMNS)
    ds = score_gradient_pairs(weights, dp - delta[None, :], dtype)
    ds_tile = rings.d_scores.index(step % 2)
    ds_tile.store(unpack_pairs(ds, dtype))
    fence_async_shared()
    dv = warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(rings.d_out.empty.index(do_slot), count=1)
    dq = _product(ds_tile.permute((1, 0)), k, BLOCK_M, MAIN)
    dq_rest = _product(ds_tile.permute((1, 0)), rings.key_rest, BLOCK_M, SHAPE.REST_SIZE)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    if gradients.turns is not None:
        await_turn(SHAPE.ADDERS)
    out = query_sums(step, item, gradients, SHAPE)
    add_columns(out, 0, dq)
    dq_rest = warpgroup_mma_wait(0, deps=(dq_rest,))
    add_columns(out, MAIN, dq_rest)
    if gradients.turns is not None:
        pass_turn(SHAPE.ADDERS)
    return dv, dk, dk_rest


@gluon.jit
def _add_keys(dk, dk_rest, rings, step):
    """Starts the products that add what the step before `step` gives to the keys' gradient."""
    before, _ = ring_slot(rings.query, gl.maximum(step - 1, 0))
    ds = rings.d_scores.index((step + 1) % 2)
    dk = warpgroup_mma(ds, rings.query.tiles.index(before), dk, is_async=True)
    return dk, warpgroup_mma(ds, rings.query_rest.index(before), dk_rest, is_async=True)


@gluon.jit
def _no_sums(KEYS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    return gl.zeros([KEYS, WIDTH], gl.float32, layout)


@gluon.jit
def _product(left, right, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts a product of tiles in shared memory, half of its columns for each warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
