"""Gradients of keys and values on Hopper: the roles that work them out, two warpgroups or both as one.

Weights and score gradients are pairs of 16 bits, as the matrix units take them: a register holds two columns. The
language's own 16-bit tensors take a register for each element until they are used.
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

from torch_core.attention.kernels.backward_hopper.queries import await_room, signal_full
from torch_core.attention.kernels.backward_hopper.work import full_tiles
from torch_core.device.hopper_turns import ring_slot
from torch_core.device.mask import LOG2E

# Edges of the mask.
FIRST = gl.constexpr(0)
LAST = gl.constexpr(1)
_WEIGHTS = "{{ .reg .f32 a, b; ex2.approx.ftz.f32 a, $1; ex2.approx.ftz.f32 b, $2; cvt.rn.{0}x2.f32 $0, b, a; }}"
_FLOATS = (
    "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;",
    "{ .reg .b16 h, i; mov.b32 {h, i}, $1; cvt.f32.f16 a, h; cvt.f32.f16 b, i; }",
)
_GRADIENT = "{{ .reg .b32 a, b; {1} mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.{0}x2.f32 $0, b, a; }}"
_KINDS = ("bf16", "f16")
# By whether elements are float16.
_WEIGHT_STEP = gl.constexpr(tuple(_WEIGHTS.format(kind) for kind in _KINDS))
_GRADIENT_STEP = gl.constexpr(
    tuple(_GRADIENT.format(kind, floats) for kind, floats in zip(_KINDS, _FLOATS, strict=True))
)


@gluon.jit
def key_gradients(OWN: gl.constexpr, item, rings, gradients, SHAPE: gl.constexpr):
    """One role: 64 or 128 keys of the tile through all queries of the group that see them, the last queries first."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    KEYS: gl.constexpr = SHAPE.ROLE_KEYS
    START: gl.constexpr = OWN * KEYS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, BLOCK_M, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, SHAPE.HEAD_SIZE, 16])
    rows = START + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = full_tiles(item, START, KEYS, SHAPE)
    k = rings.key.tiles.index(0).slice(START, KEYS)
    v = rings.value.tiles.index(0).slice(START, KEYS)
    dk = gl.zeros([KEYS, SHAPE.HEAD_SIZE], gl.float32, G_LAYOUT)
    dv = gl.zeros([KEYS, SHAPE.HEAD_SIZE], gl.float32, G_LAYOUT)
    factor = gradients.scale * LOG2E
    mbarrier.wait(rings.key.full.index(0), 0)
    mbarrier.wait(rings.value.full.index(0), 0)
    if item.end > item.start:
        # The first step finds score gradients of zero where later ones find those of the step before.
        rings.d_scores.index(1).slice(START, KEYS).store(gl.zeros([KEYS, BLOCK_M], k.dtype, S_LAYOUT))
        fence_async_shared()
        sums, step = through_queries(
            _step, (dk, dv), (k, v, rings, factor), item, rows, low, high, OWN, SHAPE, S_LAYOUT
        )
        dk, dv = sums
        dk = _add_keys(dk, rings, step, OWN)
        dk = warpgroup_mma_wait(0, deps=(dk,))
    _store(dv, v, gradients.value, 1.0, item, START, SHAPE.D_VALUE_STRIDES, SHAPE.HEAD_SIZE)
    _store(dk, v, gradients.key, gradients.scale, item, START, SHAPE.D_KEY_STRIDES, SHAPE.HEAD_SIZE)


@gluon.jit
def _step(sums, given, step, bound, OWN: gl.constexpr, EDGE: gl.constexpr, SHAPE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """One tile of queries: scores and weights, keys by rows; the keys' gradient of the step before meanwhile."""
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    dk, dv = sums
    k, v, rings, factor = given
    dtype: gl.constexpr = k.dtype
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    q_slot, q_phase = ring_slot(rings.query, step)
    do_slot, do_phase = ring_slot(rings.d_out, step)
    q = rings.query.tiles.index(q_slot)
    do = rings.d_out.tiles.index(do_slot)
    stats = rings.stats.index(q_slot)
    KEYS: gl.constexpr = k.shape[0]
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    mbarrier.wait(rings.query.full.index(q_slot), q_phase)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dk = _add_keys(dk, rings, step, OWN)
    s = warpgroup_mma_wait(1, deps=(s,))
    if EDGE is not None:
        s = mask_edge(s, bound, EDGE)
    lse = stats.slice(0, BLOCK_M).load(COLUMNS)
    weights = weight_pairs(s * factor - lse[None, :], dtype)
    p = gl.convert_layout(unpack_pairs(weights, dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    mbarrier.wait(rings.d_out.full.index(do_slot), do_phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dk, dp = warpgroup_mma_wait(1, deps=(dk, dp))
    if step > 0:
        before, _ = ring_slot(rings.query, step - 1)
        mbarrier.arrive(rings.query.empty.index(before), count=1)
    delta = stats.slice(BLOCK_M, BLOCK_M).load(COLUMNS)
    ds = score_gradient_pairs(weights, dp - delta[None, :], dtype)
    await_room(step, OWN, KEYS // 64)
    rings.d_scores.index(step % 2).slice(OWN * KEYS, KEYS).store(unpack_pairs(ds, dtype))
    fence_async_shared()
    signal_full(step, 2)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(rings.d_out.empty.index(do_slot), count=1)
    return dk, dv


@gluon.jit
def through_queries(
    STEP: gl.constexpr, sums, given, item, rows, low, high, OWN: gl.constexpr, SHAPE: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes keys of a tile through all queries of the group that see them, the last queries first.

    STEP(sums, given, step, bound, OWN, EDGE, SHAPE, S_LAYOUT) adds a tile of queries to the sums, a tuple. `bound` is
    the first or the last query that sees each key, at that EDGE of the mask. `rows` are the keys, counted from the
    tile's first; [low, high) are their `full_tiles`. Returns (sums, number of steps).
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    GROUP: gl.constexpr = SHAPE.GROUP
    step = 0
    if SHAPE.LEFT:
        last = gl.where(rows < item.keys, item.last + rows, -(2**30))
        for i in range((item.end - high) * GROUP):
            bound = last - (item.end - 1 - i // GROUP) * BLOCK_M
            sums = STEP(sums, given, step, bound, OWN, LAST, SHAPE, S_LAYOUT)
            step += 1
    first = gl.where(rows < item.keys, item.first + rows, 2**30)
    left = low
    if SHAPE.RISES:
        for i in range(gl.where(item.rises, low - item.start, 0) * GROUP):
            bound = first - (item.start + i // GROUP) * BLOCK_M
            sums = STEP(sums, given, step, bound, OWN, FIRST, SHAPE, S_LAYOUT)
            step += 1
        left = gl.where(item.rises, item.start, low)
    for _ in range((high - low) * GROUP):
        sums = STEP(sums, given, step, first, OWN, None, SHAPE, S_LAYOUT)
        step += 1
    for i in range((left - item.start) * GROUP):
        bound = first - (low - 1 - i // GROUP) * BLOCK_M
        sums = STEP(sums, given, step, bound, OWN, FIRST, SHAPE, S_LAYOUT)
        step += 1
    return sums, step


@gluon.jit
def mask_edge(s, bound, EDGE: gl.constexpr):
    """Scores, keys by rows, without the queries before or beyond the `bound` of each key, at that EDGE of the mask."""
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    keep = columns >= bound[:, None] if EDGE == FIRST else columns <= bound[:, None]
    return gl.where(keep, s, float("-inf"))


@gluon.jit
def _add_keys(dk, rings, step, OWN: gl.constexpr):
    """Starts the product that adds the share of the step before `step` to the keys' gradient."""
    before, _ = ring_slot(rings.query, gl.maximum(step - 1, 0))
    KEYS: gl.constexpr = dk.shape[0]
    ds = rings.d_scores.index((step + 1) % 2).slice(OWN * KEYS, KEYS)
    return warpgroup_mma(ds, rings.query.tiles.index(before), dk, is_async=True)


@gluon.jit
def _store(grad, tile, out, factor, item, START: gl.constexpr, STRIDES: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Stores the sums of a role's keys, 16 bytes at a time: they pass through `tile`, which is done with."""
    LANES: gl.constexpr = HEAD_SIZE // 8
    KEYS: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [KEYS // 16, 1], [1, 0])
    tile.store((grad * factor).to(tile.dtype))
    result = tile.load(layout)
    rows = START + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, layout))
    tokens = (item.first_key + rows).to(gl.int64)
    pointers = out + tokens * STRIDES[0] + item.kv_head * STRIDES[1]
    gl.store(pointers[:, None] + columns[None, :], result, mask=(rows < item.keys)[:, None])


@gluon.jit
def weight_pairs(exponents, DTYPE: gl.constexpr):
    """Pairs of 2 ** exponents, `[rows, columns // 2]` int32."""
    kind: gl.constexpr = int(gl.float16 == DTYPE)
    even, odd = _columns(exponents)
    return gl.inline_asm_elementwise(_WEIGHT_STEP[kind], "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def score_gradient_pairs(weights, x, DTYPE: gl.constexpr):
    """Pairs of the products of pairs of weights with x, a float32 tensor."""
    kind: gl.constexpr = int(gl.float16 == DTYPE)
    even, odd = _columns(x)
    return gl.inline_asm_elementwise(
        _GRADIENT_STEP[kind], "=r,r,f,f", [weights, even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pairs(pairs, DTYPE: gl.constexpr):
    """The 16-bit tensor `[rows, columns]` of pairs."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]]).to(DTYPE, bitcast=True)


@gluon.jit
def load_pairs(tile, x):
    """Loads pairs from shared memory as the threads have them that have the columns of x."""
    even, _ = _columns(x)
    return tile.load(even.type.layout)


@gluon.jit
def _columns(x):
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
