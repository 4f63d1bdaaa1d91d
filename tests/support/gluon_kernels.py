"""Gluon kernels for tests: one that reads through a TMA descriptor, with its plan, and one with faults on demand."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.base.specs import ArraySpec
from torch_core.device.gluon_names import async_load
from torch_core.launch.plan import Descriptor, LaunchPlan, OperationPlan, Pointer, Scalar

__all__ = ["scaled_copy", "scaled_copy_kernel", "squares_kernel"]


@gluon.jit
def scaled_copy_kernel(x_desc, factor, y_ptr, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """y = x * factor for one tile of ROWS rows, read by the copy engine into shared memory."""
    shared = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    first = gl.program_id(0) * ROWS
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    async_load(x_desc, [first, 0], barrier, shared)
    mbarrier.wait(barrier, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = shared.load(layout)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    out = (tile.to(gl.float32) * factor).to(y_ptr.dtype.element_ty)
    gl.store(y_ptr + rows[:, None] * stride + columns[None, :], out)


def scaled_copy(rows: int = 256, columns: int = 64, box: int = 64) -> OperationPlan:
    """Plans y = 3 x for a bfloat16 matrix, tile by tile."""
    spec = ArraySpec((rows, columns), "bfloat16")
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    launch = LaunchPlan(
        kernel=scaled_copy_kernel,
        grid=(rows // box,),
        arguments=(
            ("x_desc", Descriptor("x", (rows, columns), (columns, 1), (box, columns), layout)),
            ("factor", Scalar(3.0, "fp32")),
            ("y_ptr", Pointer("y")),
            ("stride", Scalar(columns, "i32")),
        ),
        constexprs=(("ROWS", box), ("COLUMNS", columns)),
        writes=("y",),
    )
    return OperationPlan(name="scaled_copy", inputs=(("x", spec),), outputs=(("y", spec),), launches=(launch,))


@gluon.jit
def _load(source, ring, full, empty, TILES: gl.constexpr):
    for i in range(TILES):
        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), 64 * 64 * 2)
        async_load(source, [i * 64, 0], full.index(i % 2), ring.index(i % 2))


@gluon.jit
def _square(out, ring, full, empty, TILES: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    total = gl.zeros([64, 64], gl.float32, layout)
    for i in range(TILES - 1 if FAULT == "left" else TILES):
        tile = ring.index(i % 2)
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        total = warpgroup_mma(tile, tile.permute((1, 0)), total, is_async=True)
        if FAULT == "early":
            mbarrier.arrive(empty.index(i % 2), count=1)
        if FAULT != "running":
            total = warpgroup_mma_wait(0, deps=(total,))
        if FAULT != "early" and FAULT != "kept":
            mbarrier.arrive(empty.index(i % 2), count=1)
    gl.store(out + rows[:, None] * 64 + columns[None, :], total)


@gluon.jit
def squares_kernel(source, out, TILES: gl.constexpr, FAULT: gl.constexpr):
    """The sum of the products of tiles of 64 rows with themselves, through a ring of two slots; with a FAULT on demand.

    FAULT: "early", a slot is given away before its product has ended; "kept", it never is; "left", nobody waits for the
    last copy; "running", nobody waits for the products; "none".
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(source.dtype, [2, 64, 64], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [(_square, (out, ring, full, empty, TILES, FAULT)), (_load, (source, ring, full, empty, TILES))], [1], [24]
    )
