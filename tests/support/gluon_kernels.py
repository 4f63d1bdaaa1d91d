"""A Gluon kernel that reads through a TMA descriptor, and its plan, for the tests of descriptors."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.gluon_names import async_load
from torch_core.plan.plan import Descriptor, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["scaled_copy", "scaled_copy_kernel"]


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
