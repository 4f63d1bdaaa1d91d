"""The plan of the copy of whole blocks inside one array (copy-on-write)."""

from __future__ import annotations

import math
from functools import lru_cache

from torch_core.blocks.copy.kernel import copy_blocks_kernel
from torch_core.errors import InvalidInput
from torch_core.plan.operands import ceil_div, check_contiguous, power_of_two
from torch_core.plan.plan import ArraySpec, LaunchPlan, OperationPlan, Pointer, Scalar

__all__ = ["plan_copy_blocks"]

_MAX_INNER_AXES = 4
_TILE_ELEMENTS = 4096


@lru_cache(maxsize=256)
def plan_copy_blocks(kv_cache: ArraySpec, block_mapping: ArraySpec) -> OperationPlan:
    """Plans the copy of whole blocks inside one array, in place.

    Buffers: block_mapping, kv_cache (in place). The copies run in no order: no target may be another pair's source or
    target. A pair with an id outside the pool (-1 as padding) copies nothing.

    Args:
        kv_cache: an array whose first of two to five axes is the block: a KV cache, or a cache of scales. Any strides.
        block_mapping: int32 or int64 [num_pairs, 2], each (source, target).

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit.
    """
    if not 2 <= len(kv_cache.shape) <= 1 + _MAX_INNER_AXES:
        raise InvalidInput(f"kv_cache has shape {list(kv_cache.shape)}; it must have 2 to 5 axes, blocks first.")
    if len(block_mapping.shape) != 2 or block_mapping.shape[1] != 2 or block_mapping.dtype not in ("int32", "int64"):
        raise InvalidInput(
            f"block_mapping is {block_mapping.dtype}{list(block_mapping.shape)}; it must be int32 [num_pairs, 2]."
        )
    check_contiguous("block_mapping", block_mapping)
    num_blocks, *inner = kv_cache.shape
    block_stride, *inner_strides = kv_cache.element_strides
    if kv_cache.strides is None:
        # One run of memory: no index arithmetic, full vectors whatever the sizes of the axes.
        inner, inner_strides = [math.prod(inner)], [1]
    padding = _MAX_INNER_AXES - len(inner)
    inner, inner_strides = [1] * padding + inner, [0] * padding + inner_strides
    size = math.prod(inner)
    elements = min(power_of_two(size), _TILE_ELEMENTS)
    launch = LaunchPlan(
        kernel=copy_blocks_kernel,
        grid=(max(1, block_mapping.shape[0]), max(1, ceil_div(size, elements))),
        arguments=(
            ("block_mapping", Pointer("block_mapping")),
            ("kv_cache", Pointer("kv_cache")),
            ("num_blocks", Scalar(num_blocks, "i64", specialize=False)),
            ("block_stride", Scalar(block_stride, "i64")),
            *((f"stride_{axis}", Scalar(stride, "i64")) for axis, stride in enumerate(inner_strides)),
        ),
        constexprs=(*((f"SIZE_{axis}", size) for axis, size in enumerate(inner)), ("ELEMENTS", elements)),
        writes=("kv_cache",),
        num_warps=4,
        num_stages=1,
        hot=True,
    )
    return OperationPlan(
        name="copy_blocks",
        inputs=(("block_mapping", block_mapping), ("kv_cache", kv_cache)),
        in_place=("kv_cache",),
        launches=(launch,),
    )
