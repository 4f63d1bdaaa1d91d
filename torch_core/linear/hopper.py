"""One row times a matrix on Hopper: the copy engine reads ahead while the row is normalised."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.gluon_names import async_load, reinterpret

__all__ = ["hopper_linear_row_kernel"]


@gluon.jit
def hopper_linear_row_kernel(
    x,
    norm_weight,
    kernel,
    bias,
    residual,
    out,
    epsilon,
    IN: gl.constexpr,
    ROW: gl.constexpr,
    OUT: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `linear_row_kernel`, with SiLU for an activation. Grid: (tiles of BLOCK_N columns,).

    A ring of STAGES steps of BLOCK_K rows each; the slot of a step is filled again when all have read it.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    STEPS: gl.constexpr = IN // BLOCK_K
    TILES: gl.constexpr = 2 if GATED else 1
    WARPS: gl.constexpr = gl.num_warps()
    # 16 bytes of a row of the kernel for each thread.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [WARPS, 1], [1, 0])
    column = gl.program_id(0) * BLOCK_N
    tiles = gl.allocate_shared_memory(dtype, [STAGES * TILES, BLOCK_K, BLOCK_N], kernel.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        _load_step(kernel, tiles, full, i, i, column, OUT, TILES)

    elements = gl.arange(0, ROW, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    value = gl.load(x + elements, mask=elements < IN, other=0.0)
    if norm_weight is not None:
        weight = gl.load(norm_weight + elements, mask=elements < IN, other=0.0).to(gl.float32)
        wide = value.to(gl.float32)
        factor = gl.rsqrt(gl.sum(wide * wide, 0) / IN + epsilon)
        value = ((wide * factor).to(dtype).to(gl.float32) * weight).to(dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row = gl.allocate_shared_memory(dtype, [ROW], flat)
    row.store(value)
    row = reinterpret(row, dtype, ROW // BLOCK_K, BLOCK_K, flat)
    gl.thread_barrier()

    total = gl.zeros([BLOCK_K, BLOCK_N], gl.float32, layout)
    total_up = gl.zeros([BLOCK_K, BLOCK_N], gl.float32, layout)
    for i in range(STEPS):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        factors = gl.expand_dims(row.index(i).load(gl.SliceLayout(1, layout)).to(gl.float32), 1)
        left = tiles.index(slot * TILES).load(layout)
        if GATED:
            right = tiles.index(slot * TILES + 1).load(layout)
        gl.thread_barrier()
        if i + STAGES < STEPS:
            _load_step(kernel, tiles, full, i + STAGES, slot, column, OUT, TILES)
        total += factors * left.to(gl.float32)
        if GATED:
            total_up += factors * right.to(gl.float32)

    columns = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    inside = columns < OUT
    result = gl.sum(total, 0)
    if bias is not None:
        result += gl.load(bias + columns, mask=inside, other=0.0).to(gl.float32)
    if GATED:
        up = gl.sum(total_up, 0)
        if bias is not None:
            up += gl.load(bias + OUT + columns, mask=inside, other=0.0).to(gl.float32)
        result = result / (1.0 + gl.exp2(-1.4426950408889634 * result)) * up
    if residual is not None:
        result = result.to(dtype).to(gl.float32) + gl.load(residual + columns, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + columns, result.to(dtype), mask=inside)


@gluon.jit
def _load_step(kernel, tiles, full, step, slot, column, OUT: gl.constexpr, TILES: gl.constexpr):
    BLOCK_K: gl.constexpr = tiles.shape[1]
    BLOCK_N: gl.constexpr = tiles.shape[2]
    barrier = full.index(slot)
    mbarrier.expect(barrier, TILES * 2 * BLOCK_K * BLOCK_N)
    async_load(kernel, [step * BLOCK_K, column], barrier, tiles.index(slot * TILES))
    if TILES == 2:
        async_load(kernel, [step * BLOCK_K, OUT + column], barrier, tiles.index(slot * TILES + 1))
