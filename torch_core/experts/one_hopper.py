"""One token through its experts on Hopper: the copy engine brings rows of both kernels without a pause between them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_turns import make_ring, open_slot

__all__ = ["COLUMNS", "FEW", "STEPS", "hopper_one_token_kernel"]

#: Columns of a slice of gate and of up, rows of a step, rows of the second kernel that one copy brings whole.
COLUMNS = gl.constexpr(64)
STEPS = gl.constexpr(64)
FEW = gl.constexpr(8)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_WARPS = gl.constexpr(8)
_SLICE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [_WARPS.value, 1], [1, 0]))
_ROWS = gl.constexpr(gl.BlockedLayout([8, 8], [1, 32], [1, _WARPS.value], [1, 0]))


@gluon.jit
def hopper_one_token_kernel(
    gate_up_kernel,
    down_kernel,
    x,
    topk_ids,
    topk_weights,
    partials,
    HIDDEN: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    DOWN_STAGES: gl.constexpr,
):
    """As `one_token_kernel`, silu and no biases; INNER is whole slices and HIDDEN a power of two, from 2048."""
    dtype: gl.constexpr = x.dtype.element_ty
    ring = make_ring(gl.allocate_shared_memory(dtype, [2 * STAGES, STEPS, COLUMNS], _TILE), STAGES)
    down = make_ring(gl.allocate_shared_memory(dtype, [DOWN_STAGES, FEW, HIDDEN], _TILE), DOWN_STAGES)
    factors = gl.allocate_shared_memory(gl.float32, [COLUMNS], _VECTOR)
    for i in gl.static_range(STAGES):
        open_slot(ring, i, 1)
    for i in gl.static_range(DOWN_STAGES):
        open_slot(down, i, 1)
    SLICES: gl.constexpr = INNER // COLUMNS
    place = gl.program_id(0) // SLICES
    column = gl.program_id(0) % SLICES * COLUMNS
    expert = gl.load(topk_ids + place)
    weight = gl.load(topk_weights + place)
    target = partials + gl.program_id(0) * HIDDEN
    gl.warp_specialize(
        [
            (_multiply, (x, weight, target, factors, ring, down, HIDDEN, STAGES, DOWN_STAGES)),
            (_load_rows, (gate_up_kernel, down_kernel, expert, column, ring, down, HIDDEN, INNER, STAGES, DOWN_STAGES)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _multiply(
    x, weight, target, factors, ring, down, HIDDEN: gl.constexpr, STAGES: gl.constexpr, DOWN_STAGES: gl.constexpr
):
    steps = gl.arange(0, STEPS, gl.SliceLayout(1, _SLICE))
    gate = gl.zeros([STEPS, COLUMNS], gl.float32, _SLICE)
    up = gl.zeros([STEPS, COLUMNS], gl.float32, _SLICE)
    ahead = gl.load(x + steps)
    for i in range(HIDDEN // STEPS):
        slot = i % STAGES
        value = ahead.to(gl.float32)[:, None]
        following = (i + 1) * STEPS + steps
        ahead = gl.load(x + following, mask=following < HIDDEN, other=0.0)
        mbarrier.wait(ring.full.index(slot), (i // STAGES) & 1)
        left = ring.tiles.index(2 * slot).load(_SLICE)
        right = ring.tiles.index(2 * slot + 1).load(_SLICE)
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index(slot), count=1)
        gate += value * left.to(gl.float32)
        up += value * right.to(gl.float32)
    total = gl.sum(gate, 0)
    total = total / (1 + gl.exp2(total * -1.4426950408889634)) * gl.sum(up, 0) * weight
    factors.store(total)
    gl.thread_barrier()
    lanes = gl.arange(0, HIDDEN, gl.SliceLayout(0, _ROWS))
    result = gl.zeros([HIDDEN], gl.float32, gl.SliceLayout(0, _ROWS))
    for i in gl.static_range(COLUMNS // FEW):
        slot = i % DOWN_STAGES
        value = factors.slice(i * FEW, FEW).load(gl.SliceLayout(1, _ROWS))[:, None]
        mbarrier.wait(down.full.index(slot), (i // DOWN_STAGES) & 1)
        right = down.tiles.index(slot).load(_ROWS)
        gl.thread_barrier()
        mbarrier.arrive(down.empty.index(slot), count=1)
        result += gl.sum(value * right.to(gl.float32), 0)
    gl.store(target + lanes, result)


@gluon.jit
def _load_rows(
    gate_up_kernel, down_kernel, expert, column, ring, down, HIDDEN: gl.constexpr, INNER: gl.constexpr,
    STAGES: gl.constexpr, DOWN_STAGES: gl.constexpr,
):  # fmt: skip
    for i in range(HIDDEN // STEPS):
        slot = i % STAGES
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full, 4 * STEPS * COLUMNS)
        row = expert * HIDDEN + i * STEPS
        async_load(gate_up_kernel, [row, column], full, ring.tiles.index(2 * slot))
        async_load(gate_up_kernel, [row, column + INNER], full, ring.tiles.index(2 * slot + 1))
    for i in range(COLUMNS // FEW):
        slot = i % DOWN_STAGES
        full = down.full.index(slot)
        mbarrier.wait(down.empty.index(slot), ((i // DOWN_STAGES) & 1) ^ 1)
        mbarrier.expect(full, 2 * FEW * HIDDEN)
        async_load(down_kernel, [expert * INNER + column + i * FEW, 0], full, down.tiles.index(slot))
