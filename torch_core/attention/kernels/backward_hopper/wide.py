"""The warpgroups of the Hopper backward kernel for wide heads: one for the values' gradient, one for the keys'.

The sums of 64 keys of wide heads fill half of a warpgroup's registers each, so two warpgroups share them instead of the
keys: the one that adds up the gradient of values makes the weights, and passes them on through shared memory.
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
from torch_core.attention.kernels.backward_hopper.pairs import (
    load_pairs,
    score_gradient_pairs,
    unpack_pairs,
    weight_pairs,
)
from torch_core.attention.kernels.backward_hopper.signals import (
    await_room,
    await_weights,
    signal_full,
    signal_weights,
)
from torch_core.attention.kernels.backward_hopper.work import full_tiles, store_rows
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.mask import LOG2E

__all__ = ["wide_key_gradients", "wide_value_gradients"]


@gluon.jit
def wide_value_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: the weights of the tile's keys and the gradient of their values, the last queries first."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    GROUP: gl.constexpr = SHAPE.GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = full_tiles(item, 0, 64, SHAPE)
    k = rings.key.tiles.index(0)
    dv = _no_sums()
    factor = gradients.scale * LOG2E
    mbarrier.wait(rings.key.full.index(0), 0)
    step = 0
    if SHAPE.LEFT:
        last = gl.where(rows < item.keys, item.last + rows, -(2**30))
        for i in range((item.end - high) * GROUP):
            bound = last - (item.end - 1 - i // GROUP) * BLOCK_M
            dv = _weigh(k, dv, rings, step, factor, bound, LAST, SHAPE, S_LAYOUT)
            step += 1
    first = gl.where(rows < item.keys, item.first + rows, 2**30)
    for _ in range((high - low) * GROUP):
        dv = _weigh(k, dv, rings, step, factor, first, None, SHAPE, S_LAYOUT)
        step += 1
    for i in range((low - item.start) * GROUP):
        bound = first - (low - 1 - i // GROUP) * BLOCK_M
        dv = _weigh(k, dv, rings, step, factor, bound, FIRST, SHAPE, S_LAYOUT)
        step += 1
    _store(dv, gradients.value, 1.0, item, SHAPE.D_VALUE_STRIDES)


@gluon.jit
def _weigh(k, dv, rings, step, factor, bound, EDGE: gl.constexpr, SHAPE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """One tile of queries: scores and weights, keys by rows."""
    dtype: gl.constexpr = k.dtype
    q_slot, q_phase = ring_slot(rings.query, step)
    do_slot, do_phase = ring_slot(rings.d_out, step)
    do = rings.d_out.tiles.index(do_slot)
    mbarrier.wait(rings.query.full.index(q_slot), q_phase)
    s = _multiply(k, rings.query.tiles.index(q_slot), S_LAYOUT)
    if EDGE is not None:
        s = mask_edge(s, bound, EDGE)
    lse = rings.stats.index(q_slot).slice(0, SHAPE.BLOCK_M).load(gl.SliceLayout(0, S_LAYOUT))
    mbarrier.arrive(rings.query.empty.index(q_slot), count=1)
    weights = weight_pairs(s * factor - lse[None, :], dtype)
    # The slot has been read: its tile of queries is another one since.
    rings.weights.index(q_slot).store(weights)
    signal_weights(step)
    mbarrier.wait(rings.d_out.full.index(do_slot), do_phase)
    dv = _add(unpack_pairs(weights, dtype), do, dv)
    mbarrier.arrive(rings.d_out.empty.index(do_slot), count=1)
    return dv


@gluon.jit
def wide_key_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: score gradients, for the one that works on queries too, and from them the gradient of the keys."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    v = rings.value.tiles.index(0)
    dtype: gl.constexpr = v.dtype
    dk = _no_sums()
    mbarrier.wait(rings.value.full.index(0), 0)
    for step in range((item.end - item.start) * SHAPE.GROUP):
        q_slot, q_phase = ring_slot(rings.query, step)
        do_slot, do_phase = ring_slot(rings.d_out, step)
        q = rings.query.tiles.index(q_slot)
        mbarrier.wait(rings.d_out.full.index(do_slot), do_phase)
        dp = _multiply(v, rings.d_out.tiles.index(do_slot), S_LAYOUT)
        mbarrier.arrive(rings.d_out.empty.index(do_slot), count=1)
        mbarrier.wait(rings.query.full.index(q_slot), q_phase)
        delta = rings.stats.index(q_slot).slice(BLOCK_M, BLOCK_M).load(gl.SliceLayout(0, S_LAYOUT))
        dp = dp - delta[None, :]
        await_weights(step)
        weights = load_pairs(rings.weights.index(q_slot), dp)
        ds = unpack_pairs(score_gradient_pairs(weights, dp, dtype), dtype)
        await_room(step, 0, 1)
        rings.d_scores.index(step % 2).store(ds)
        fence_async_shared()
        signal_full(step, 1)
        dk = _add(ds, q, dk)
        mbarrier.arrive(rings.query.empty.index(q_slot), count=1)
    _store(dk, gradients.key, gradients.scale, item, SHAPE.D_KEY_STRIDES)


@gluon.jit
def _no_sums():
    """The sums of 64 keys in two halves: no wider product fits the registers that a thread starts with."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    return gl.zeros([64, 128], gl.float32, layout), gl.zeros([64, 128], gl.float32, layout)


@gluon.jit
def _multiply(left, right, LAYOUT: gl.constexpr):
    """The products of rows with rows."""
    BLOCK_M: gl.constexpr = right.shape[0]
    zeros = gl.zeros([64, BLOCK_M], gl.float32, LAYOUT)
    result = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(result,))


@gluon.jit
def _add(left, right, sums):
    """Adds a product to both halves of sums."""
    low, high = sums
    left = gl.convert_layout(left, gl.DotOperandLayout(0, low.type.layout, 2))
    low = warpgroup_mma(left, right.slice(0, 128, 1), low, is_async=True)
    high = warpgroup_mma(left, right.slice(128, 128, 1), high, is_async=True)
    return warpgroup_mma_wait(0, deps=(low, high))


@gluon.jit
def _store(sums, out, factor, item, STRIDES: gl.constexpr):
    low, high = sums
    out += item.kv_head * STRIDES[1]
    store_rows(low * factor, out, item, STRIDES[0])
    store_rows(high * factor, out + low.shape[1], item, STRIDES[0])
