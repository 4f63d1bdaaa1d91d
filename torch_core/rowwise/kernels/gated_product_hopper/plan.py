"""The product of many rows with gates on Hopper: which calls it serves, and its launch."""

from __future__ import annotations

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.base.specs import HOPPER_ARCH, ArraySpec
from torch_core.launch.operands import ceil_div, named_launch
from torch_core.launch.plan import Argument, Descriptor, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.rowwise.call import RowProductCall
from torch_core.rowwise.kernels.gated_product_hopper.kernel import COLUMNS, ROWS, STEPS, hopper_gated_product_kernel

# Slots of the ring by warpgroups. Three that share the columns of a tile read less of the L2 cache for each product
# than two, and take 3% less for 8,192 rows of an 8B Llama on an H100.
_STAGES = {3: 3, 2: 4, 1: 4}
_TWO_TAKE = 1.03
# Tiles of rows that run side by side: more do not fit into the L2 cache.
_GROUP = 16
_ALIGNED = 8
_MATRIX = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def is_hopper(call: RowProductCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Returns whether `hopper_gated_product` serves a call: Hopper, 16 bits, arrays that the copy engine can follow."""
    x, kernel = call.x, call.kernel
    return (
        limits.arch == HOPPER_ARCH
        # A product that is plain is the portable kernel's at any size.
        and call.activation is not None
        and call.result_dtype == x.dtype
        and x.dtype in ("bfloat16", "float16")
        and not call.transposed
        and x.shape[1] % STEPS.value == 0
        and x.shape[1] >= max(_STAGES.values()) * STEPS.value
        and call.out_features % _ALIGNED == 0
        and all(_is_matrix(spec) for spec in (x, kernel))
    )


def hopper_gated_product(call: RowProductCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a call that `is_hopper` takes. Output: out."""
    (num_rows, inputs), outputs = call.x.shape, call.out_features
    column_tiles = ceil_div(outputs, COLUMNS.value // 2)
    warpgroups = 1
    if num_rows > ROWS.value:
        warpgroups = min((3, 2), key=lambda each: _time(each, num_rows, column_tiles, limits))
    arguments: dict[str, Argument] = {
        "x": Descriptor("x", call.x.shape, call.x.element_strides, (ROWS.value, STEPS.value), _MATRIX),
        "kernel": Descriptor(
            "kernel", call.kernel.shape, call.kernel.element_strides, (STEPS.value, COLUMNS.value // 2), _MATRIX
        ),
        "out": Pointer("out"),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
    }
    constexprs = {
        "IN": inputs,
        "OUT": outputs,
        "WARPGROUPS": warpgroups,
        "STAGES": _STAGES[warpgroups],
        "GROUP": _GROUP,
    }
    tiles = ceil_div(num_rows, warpgroups * ROWS.value) * column_tiles
    launch = named_launch(
        hopper_gated_product_kernel, (min(limits.num_sms, tiles),), arguments, constexprs, writes=("out",), num_warps=4,
        num_stages=1, hot=True,
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())


def _time(warpgroups: int, num_rows: int, column_tiles: int, limits: DeviceLimits) -> float:
    """Returns the time of the rounds that a multiprocessor's tiles take, in some unit."""
    rounds = ceil_div(ceil_div(num_rows, warpgroups * ROWS.value) * column_tiles, limits.num_sms)
    return rounds * warpgroups * (_TWO_TAKE if warpgroups == 2 else 1)


def _is_matrix(spec: ArraySpec) -> bool:
    """Returns whether the copy engine can follow the rows of an array."""
    row_stride, stride = spec.element_strides
    return spec.aligned and stride == 1 and row_stride % _ALIGNED == 0
