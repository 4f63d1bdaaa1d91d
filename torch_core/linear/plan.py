"""The plan of a linear map of one row: a launch that reads the kernel once."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.calls import LinearCall
from torch_core.linear.hopper import hopper_linear_row_kernel
from torch_core.linear.hopper_rows import COLUMNS, ROWS, STEPS, hopper_gated_rows_kernel
from torch_core.linear.kernel import linear_row_kernel
from torch_core.linear.tiles import Tile, linear_tile
from torch_core.plan.operands import ceil_div, named_launch, power_of_two
from torch_core.plan.plan import ABSENT, Argument, Descriptor, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["plan_linear"]

_ARCH = 90
# A row and its norm's weights lie in the registers of a program.
_LONGEST_ROW = 32768


def plan_linear(call: LinearCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: out."""
    if call.hidden_states.shape[0] > 1:
        return OperationPlan.of(call.name, call.arrays(), (_gated_rows(call, limits),), call.outputs())
    tile = linear_tile(call.out_size, is_gated=call.activation is not None)
    launch = _hopper(call, tile) if _is_hopper(call, limits, tile) else _portable(call)
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())


def _is_hopper(call: LinearCall[ArraySpec], limits: DeviceLimits, tile: Tile) -> bool:
    """Returns whether the copy engine can follow the kernel, and no step of the row is a part of one."""
    in_size, stride = call.kernel.shape[0], call.kernel.element_strides[0]
    return (
        limits.arch == _ARCH
        and call.kernel.dtype in ("bfloat16", "float16")
        and call.activation in (None, "silu")
        and call.kernel.aligned
        and stride % 8 == 0
        and in_size % tile.steps == 0
        and in_size <= _LONGEST_ROW
    )


def _hopper(call: LinearCall[ArraySpec], tile: Tile) -> LaunchPlan:
    box = (tile.steps, tile.columns)
    layout = NVMMASharedLayout(swizzle_byte_width=2 * tile.columns, element_bitwidth=16, rank=2)
    kernel = Descriptor("kernel", call.kernel.shape, (call.kernel.element_strides[0], 1), box, layout)
    in_size = call.kernel.shape[0]
    constants = {"IN": in_size, "ROW": power_of_two(in_size), "GATED": call.activation is not None}
    return _launch(hopper_linear_row_kernel, call, tile, {"kernel": kernel}, constants)


def _gated_rows(call: LinearCall[ArraySpec], limits: DeviceLimits) -> LaunchPlan:
    (num_rows, in_size), kernel = call.hidden_states.shape, call.kernel
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    arguments: dict[str, Argument] = {
        "rows": Descriptor(
            "hidden_states",
            (num_rows, in_size),
            (call.hidden_states.element_strides[0], 1),
            (ROWS.value, STEPS.value),
            layout,
        ),
        "weights": Descriptor(
            "kernel", kernel.shape, (kernel.element_strides[0], 1), (STEPS.value, COLUMNS.value), layout
        ),
        "out": Pointer("out"),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
    }
    constants = {"IN": in_size, "OUT": call.out_size, "STAGES": 4}
    return named_launch(
        hopper_gated_rows_kernel,
        (limits.num_sms,),
        arguments,
        constants,
        writes=("out",),
        num_warps=4,
        num_stages=1,
        hot=True,
    )


def _portable(call: LinearCall[ArraySpec]) -> LaunchPlan:
    arguments = {"kernel": Pointer("kernel"), "kernel_row_stride": Scalar(call.kernel.element_strides[0], "i64")}
    constants = {"IN": call.kernel.shape[0], "ACTIVATION": call.activation}
    return _launch(linear_row_kernel, call, Tile(32, 64, 4, 4), arguments, constants)


def _launch(
    kernel: Any, call: LinearCall[ArraySpec], tile: Tile, arguments: dict[str, Argument], constants: dict[str, Any]
) -> LaunchPlan:
    given: dict[str, Argument] = {
        name: ABSENT if getattr(call, name) is None else Pointer(name) for name in ("norm_weight", "bias", "residual")
    }
    given |= {"x": Pointer("hidden_states"), "out": Pointer("out"), "epsilon": Scalar(call.norm_epsilon, "fp32")}
    constants |= {"OUT": call.out_size, "BLOCK_N": tile.columns, "BLOCK_K": tile.steps, "STAGES": tile.num_stages}
    grid = (ceil_div(call.out_size, tile.columns),)
    return named_launch(
        kernel, grid, given | arguments, constants, writes=("out",), num_warps=tile.num_warps, num_stages=1, hot=True
    )
