"""The plan of a linear map of few rows: a launch that reads the kernel once, behind one for the norm."""

from __future__ import annotations

from typing import Any

from torch_core.calls import LinearCall
from torch_core.linear.kernel import linear_rows_kernel, norm_rows_kernel
from torch_core.linear.tiles import Tile, linear_tile
from torch_core.plan.operands import ceil_div, named_launch, power_of_two
from torch_core.plan.plan import ABSENT, Argument, Descriptor, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["plan_linear"]

_COPY_ENGINE_ARCH = 90
_ALIGNED_BYTES = 16
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def plan_linear(call: LinearCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: out."""
    launches, scratch, x = [], {}, "hidden_states"
    if call.norm_weight is not None:
        x = "normed"
        scratch[x] = ArraySpec(tuple(call.hidden_states.shape), call.hidden_states.dtype)
        launches.append(_norm(call))
    spec = scratch.get(x, call.hidden_states)
    launches.append(_product(call, x, spec, limits))
    return OperationPlan.of(call.name, call.arrays(), tuple(launches), call.outputs(), scratch)


def _norm(call: LinearCall[ArraySpec]) -> LaunchPlan:
    num_rows, size = call.hidden_states.shape
    arguments: dict[str, Argument] = {
        "x": Pointer("hidden_states"),
        "weight": Pointer("norm_weight"),
        "out": Pointer("normed"),
        "epsilon": Scalar(call.norm_epsilon, "fp32"),
        "x_row_stride": Scalar(call.hidden_states.element_strides[0], "i64"),
    }
    constants = {"SIZE": size, "BLOCK": power_of_two(size)}
    return named_launch(
        norm_rows_kernel, (num_rows,), arguments, constants, writes=("normed",), num_warps=8, num_stages=1
    )


def _product(call: LinearCall[ArraySpec], x: str, spec: ArraySpec, limits: DeviceLimits) -> LaunchPlan:
    (num_rows, in_size), kernel = spec.shape, call.kernel
    tile = linear_tile(call.out_size, spec.dtype, is_gated=call.activation is not None)
    block_rows = max(8, power_of_two(num_rows))
    is_copied = limits.arch >= _COPY_ENGINE_ARCH and _is_matrix(spec) and _is_matrix(kernel)
    arguments: dict[str, Argument] = {
        "x": Pointer(x),
        "kernel": Pointer("kernel"),
        "out": Pointer("out"),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
        "x_row_stride": Scalar(spec.element_strides[0], "i64"),
        "kernel_row_stride": Scalar(kernel.element_strides[0], "i64"),
        **{name: ABSENT if getattr(call, name) is None else Pointer(name) for name in ("bias", "residual")},
    }
    if is_copied:
        arguments["x"] = _tiles(x, spec, (block_rows, tile.steps))
        arguments["kernel"] = _tiles("kernel", kernel, (tile.steps, tile.columns))
    constants: dict[str, Any] = {
        "IN": in_size,
        "OUT": call.out_size,
        "ACTIVATION": call.activation,
        "BLOCK_M": block_rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.steps,
        "STAGES": tile.num_stages,
        "COPIED": is_copied,
    }
    return _launch(call, tile, arguments, constants)


def _launch(
    call: LinearCall[ArraySpec], tile: Tile, arguments: dict[str, Argument], constants: dict[str, Any]
) -> LaunchPlan:
    grid = (ceil_div(call.out_size, tile.columns),)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "hot": True}
    return named_launch(linear_rows_kernel, grid, arguments, constants, writes=("out",), **options)


def _tiles(name: str, spec: ArraySpec, box: tuple[int, int]) -> Descriptor:
    return Descriptor(name, spec.shape, (spec.element_strides[0], 1), box)


def _is_matrix(spec: ArraySpec) -> bool:
    """Returns whether the copy engine can follow an array."""
    return spec.aligned and spec.element_strides[0] * _BYTES[spec.dtype] % _ALIGNED_BYTES == 0
