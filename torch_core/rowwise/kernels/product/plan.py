"""The plan of a product of rows: tiles by the number of rows, which no sum depends on."""

from __future__ import annotations

from typing import NamedTuple

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.rowwise.call import RowProductCall
from torch_core.rowwise.kernels.product.kernel import row_product_kernel

# Rows of the matrix units' instruction: for fewer, Triton takes another one, which rounds in another way. So of fewer
# rows the outputs take the place, and the rows that of the instruction's columns, of which there may be 16.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 16
# Inputs of one step.
_STEP = 64
_GROUP = 8


class _Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    step: int = _STEP
    outputs_first: bool = False


def plan_row_product(call: RowProductCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Output: out."""
    num_rows, inputs = call.x.shape
    outputs = call.out_features
    strides = call.kernel.element_strides[::-1] if call.transposed else call.kernel.element_strides
    tile = _tile(num_rows, outputs, call.x.dtype, limits)
    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "kernel": Pointer("kernel"),
        "out": Pointer("out"),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
        "x_row_stride": Scalar(call.x.element_strides[0], "i64"),
        "kernel_in_stride": Scalar(strides[0], "i64"),
        "kernel_out_stride": Scalar(strides[1], "i64"),
    }
    constexprs = {
        "IN": inputs,
        "OUT": outputs,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.step,
        "GROUP": _GROUP,
        "OUTPUTS_FIRST": tile.outputs_first,
    }
    launch = named_launch(
        row_product_kernel, (ceil_div(num_rows, tile.rows) * ceil_div(outputs, tile.columns),), arguments, constexprs,
        writes=("out",), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())


def _tile(num_rows: int, outputs: int, dtype: str, limits: DeviceLimits) -> _Tile:
    if dtype == "float32":
        # Not done by the matrix units: both operands are in registers.
        return _Tile(32, 64, 4, 2, _STEP // 2)
    if num_rows <= _LEAST_ROWS:
        # Such a product waits for the kernel's bytes: as many programs as there are multiprocessors read them, in tiles
        # of 16 KB, of which as many are on their way as fit.
        rows = max(_LEAST_COLUMNS, power_of_two(num_rows))
        columns, step = (64, 2 * _STEP) if ceil_div(outputs, 128) < limits.num_sms else (128, _STEP)
        stages = min(6, limits.shared_memory // ((rows + columns) * step * 2))
        return _Tile(rows, columns, 4, stages, step, outputs_first=True)
    if num_rows <= 2 * _LEAST_ROWS or ceil_div(num_rows, 128) * ceil_div(outputs, 256) < limits.num_sms:
        return _Tile(128, 64 if ceil_div(outputs, 128) < limits.num_sms else 128, 8, 4)
    return _Tile(128, 256, 8, 3)
