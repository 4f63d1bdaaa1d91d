"""Small kernels, and operations over them, for the tests of plans, launches and the native bridge."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import ABSENT, LaunchPlan, OperationPlan, Pointer, Scalar

__all__ = ["add_into_kernel", "double_and_add", "double_kernel", "double_launch", "product", "product_kernel"]


@triton.jit
def _doubled(x):
    return x + tl.max(tl.zeros([2], tl.float32), 0) + x


@triton.jit
def double_kernel(x_ptr, bias_ptr, factor, count, stride, y_ptr, N: tl.constexpr):
    """y = 2 x * factor (+ bias), for `count` elements of x that lie `stride` apart."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    y = _doubled(tl.load(x_ptr + i * stride, mask=i < count, other=0.0).to(tl.float32)) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr)
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def add_into_kernel(x_ptr, total_ptr, copy_ptr, N: tl.constexpr):
    """total += x in place, and copy = the new total."""
    i = tl.arange(0, N)
    total = tl.load(total_ptr + i) + tl.load(x_ptr + i)
    tl.store(total_ptr + i, total)
    tl.store(copy_ptr + i, total)


@triton.jit
def product_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """y = x @ x, with both operands in shared memory."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.store(y_ptr + i[:, None] * N + i[None, :], tl.dot(x, x).to(y_ptr.dtype.element_ty))


def double_launch(count: int, *, stride: int = 1, bias: bool = False, target: str = "doubled") -> LaunchPlan:
    """Plans double_kernel from "x" into `target`."""
    return LaunchPlan(
        kernel=double_kernel,
        grid=(-(-count // 16),),
        arguments=(
            ("x_ptr", Pointer("x")),
            ("bias_ptr", Pointer("bias") if bias else ABSENT),
            ("factor", Scalar(1.5, "fp32")),
            ("count", Scalar(count, "i32", specialize=False)),
            ("stride", Scalar(stride, "i32")),
            ("y_ptr", Pointer(target)),
        ),
        constexprs=(("N", 16),),
        writes=(target,),
    )


def double_and_add(count: int = 16) -> OperationPlan:
    """Plans total += 3 x in two launches, through scratch, and returns the new total as an output too."""
    spec = ArraySpec((count,), "float32")
    add = LaunchPlan(
        kernel=add_into_kernel,
        grid=(1,),
        arguments=(("x_ptr", Pointer("doubled")), ("total_ptr", Pointer("total")), ("copy_ptr", Pointer("copy"))),
        constexprs=(("N", count),),
        writes=("total", "copy"),
    )
    return OperationPlan(
        name="double_and_add",
        inputs=(("x", spec), ("total", spec)),
        in_place=("total",),
        outputs=(("copy", spec),),
        scratch=(("doubled", spec),),
        launches=(double_launch(count), add),
    )


def product(size: int = 128) -> OperationPlan:
    """Plans product_kernel, whose shared memory grows with `size`."""
    spec = ArraySpec((size, size), "bfloat16")
    launch = LaunchPlan(
        kernel=product_kernel,
        grid=(1,),
        arguments=(("x_ptr", Pointer("x")), ("y_ptr", Pointer("y"))),
        constexprs=(("N", size),),
        writes=("y",),
    )
    return OperationPlan(name="product", inputs=(("x", spec),), outputs=(("y", spec),), launches=(launch,))
