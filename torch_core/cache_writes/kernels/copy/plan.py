"""The plan of the copy of whole blocks inside one array (copy-on-write)."""

from __future__ import annotations

import math

from torch_core.base.specs import ArraySpec
from torch_core.cache_writes.call import CopyCall
from torch_core.cache_writes.kernels.copy.kernel import copy_blocks_kernel
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar

_MAX_INNER_AXES = 4
_TILE_ELEMENTS = 4096


def plan_copy(call: CopyCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked copy that is not empty, in place; buffers are named as the fields of the call."""
    kv_cache = call.kv_cache
    num_blocks, *inner = kv_cache.shape
    block_stride, *inner_strides = kv_cache.element_strides
    if kv_cache.strides is None:
        # One run of memory: no index arithmetic, and full vectors for axes of any size.
        inner, inner_strides = [math.prod(inner)], [1]
    padding = _MAX_INNER_AXES - len(inner)
    inner, inner_strides = [1] * padding + inner, [0] * padding + inner_strides
    size = math.prod(inner)
    elements = min(power_of_two(size), _TILE_ELEMENTS)
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in ("block_mapping", "kv_cache")},
        "num_blocks": Scalar(num_blocks, "i64", specialize=False),
        "block_stride": Scalar(block_stride, "i64"),
        **{f"stride_{axis}": Scalar(stride, "i64") for axis, stride in enumerate(inner_strides)},
    }
    constants = {**{f"SIZE_{axis}": size for axis, size in enumerate(inner)}, "ELEMENTS": elements}
    grid = (max(1, call.block_mapping.shape[0]), max(1, ceil_div(size, elements)))
    options = {"writes": call.written, "num_stages": 1, "hot": True}
    launch = named_launch(copy_blocks_kernel, grid, arguments, constants, **options)
    return OperationPlan(name=call.name, inputs=tuple(call.arrays().items()), in_place=call.written, launches=(launch,))
