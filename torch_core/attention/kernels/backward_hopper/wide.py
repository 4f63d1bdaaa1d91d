"""Gradients of keys and values on Hopper where their sums do not fit the registers of `key_gradients`.

Heads of 256 elements: the sums of 64 keys fill half of a warpgroup's registers each, so two warpgroups share them
instead of the keys. The one that adds up the gradient of values makes the weights, and passes them on through shared
memory.

Keys of 192 elements over values of 128: the sums of 64 keys take 160 registers of a thread. Two warpgroups hold those
of 128 keys, if there is no third. So they add to the queries' gradients, too, and are one role: the addresses of its
tiles take no registers.
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

from torch_core.attention.kernels.backward_hopper.gradients import (
    load_pairs,
    mask_edge,
    score_gradient_pairs,
    through_queries,
    unpack_pairs,
    weight_pairs,
)
from torch_core.attention.kernels.backward_hopper.queries import (
    add_columns,
    await_room,
    await_turn,
    await_weights,
    pass_turn,
    query_sums,
    signal_full,
    signal_weights,
)
from torch_core.attention.kernels.backward_hopper.work import full_tiles, store_rows
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.mask import LOG2E


@gluon.jit
def wide_value_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: the weights of the tile's keys and the gradient of their values, the last queries first."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = full_tiles(item, 0, 64, SHAPE)
    k = rings.key.tiles.index(0)
    dv = _no_sums()
    factor = gradients.scale * LOG2E
    mbarrier.wait(rings.key.full.index(0), 0)
    dv, _ = through_queries(_weigh, dv, (k, rings, factor), item, rows, low, high, 0, SHAPE, S_LAYOUT)
    _store(dv, gradients.value, 1.0, item, SHAPE.D_VALUE_STRIDES)


@gluon.jit
def _weigh(dv, given, step, bound, OWN: gl.constexpr, EDGE: gl.constexpr, SHAPE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """One tile of queries: scores and weights, keys by rows."""
    k, rings, factor = given
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


@gluon.jit
def uneven_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """Two warpgroups: the tile's keys through all queries of the group that see them, the last queries first."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    KEYS: gl.constexpr = SHAPE.BLOCK_N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = full_tiles(item, 0, KEYS, SHAPE)
    dv = _no_uneven_sums(KEYS, SHAPE.VALUE_SIZE)
    dk = _no_uneven_sums(KEYS, SHAPE.HEAD_SIZE - SHAPE.REST_SIZE)
    dk_rest = _no_uneven_sums(KEYS, SHAPE.REST_SIZE)
    sums = (dv, dk, dk_rest)
    factor = gradients.scale * LOG2E
    mbarrier.wait(rings.key.full.index(0), 0)
    mbarrier.wait(rings.value.full.index(0), 0)
    if item.end > item.start:
        # The first step finds score gradients of zero where later ones find those of the step before.
        rings.d_scores.index(1).store(gl.zeros([KEYS, BLOCK_M], rings.key.tiles.dtype, S_LAYOUT))
        fence_async_shared()
        sums, step = through_queries(
            _uneven_step, sums, (item, rings, gradients, factor), item, rows, low, high, 0, SHAPE, S_LAYOUT
        )
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
def _uneven_step(
    sums, given, step, bound, OWN: gl.constexpr, EDGE: gl.constexpr, SHAPE: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """One tile of queries: scores and weights, keys by rows; the keys' gradient of the step before meanwhile."""
    item, rings, gradients, factor = given
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    MAIN: gl.constexpr = SHAPE.HEAD_SIZE - SHAPE.REST_SIZE
    # Tiles of queries that see all keys see later ones, too.
    MAY_END: gl.constexpr = EDGE is not None
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
    await_turn(SHAPE.ADDERS)
    out = query_sums(step, item, gradients, SHAPE)
    add_columns(out, 0, dq, step, item, gradients, MAY_END, SHAPE)
    dq_rest = warpgroup_mma_wait(0, deps=(dq_rest,))
    add_columns(out, MAIN, dq_rest, step, item, gradients, MAY_END, SHAPE)
    pass_turn(SHAPE.ADDERS)
    return dv, dk, dk_rest


@gluon.jit
def _add_keys(dk, dk_rest, rings, step):
    """Starts the products that add the share of the step before `step` to the keys' gradient."""
    before, _ = ring_slot(rings.query, gl.maximum(step - 1, 0))
    ds = rings.d_scores.index((step + 1) % 2)
    dk = warpgroup_mma(ds, rings.query.tiles.index(before), dk, is_async=True)
    return dk, warpgroup_mma(ds, rings.query_rest.index(before), dk_rest, is_async=True)


@gluon.jit
def _no_uneven_sums(KEYS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    return gl.zeros([KEYS, WIDTH], gl.float32, layout)


@gluon.jit
def _product(left, right, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts a product of tiles in shared memory, half of its columns for each warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
