"""The plan of a layer of experts: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.calls import ExpertsCall
from torch_core.experts.align import align_experts_kernel, count_experts_kernel
from torch_core.experts.combine import combine_experts_kernel
from torch_core.experts.kernel import expert_product_kernel
from torch_core.experts.tiles import MAX_LOOKED_UP, Tile, expert_tile
from torch_core.plan.operands import ceil_div, named_launch, power_of_two
from torch_core.plan.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["plan_experts"]

_CHUNK = 4096
_COMBINED_COLUMNS = 256
# Tiles of rows that run beside each other on the same columns.
_GROUP = 8


def plan_experts(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: out."""
    dtype, num_experts = call.hidden_states.dtype, call.num_experts
    num_tokens, hidden = call.hidden_states.shape
    inner = call.down_kernel.shape[1]
    tiles = {
        gated: expert_tile(
            call.num_pairs, num_experts, hidden if gated else inner, dtype, gated=gated,
            shared_memory=limits.shared_memory,
        )
        for gated in (True, False)
    }  # fmt: skip
    scratch = {
        "gated": ArraySpec((call.num_pairs, inner), dtype),
        "rows": ArraySpec((call.num_pairs, hidden), dtype),
    }
    launches: list[LaunchPlan] = []
    if call.num_pairs > MAX_LOOKED_UP:
        tile_rows = tiles[True].rows
        num_tiles = (call.num_pairs + min(num_experts, call.num_pairs) * (tile_rows - 1)) // tile_rows
        scratch = {
            "counts": ArraySpec((num_experts,), "int32"),
            "sorted_ids": ArraySpec((num_tiles * tile_rows,), "int32"),
            "tile_experts": ArraySpec((num_tiles,), "int32"),
            **scratch,
        }
        launches += _align(call, num_tiles, tile_rows)
        row_tiles = num_tiles
    else:
        # As many programs as the kernel has expert by expert, or pair by pair where that is fewer.
        num_tiles, row_tiles = 0, call.num_pairs if power_of_two(call.num_pairs) <= num_experts else num_experts
    for gated in (True, False):
        launches.append(_product(call, tiles[gated], num_tiles, row_tiles, gated=gated))
    constants = {
        "NUM_EXPERTS": num_experts,
        "TOP_K": call.topk_ids.shape[1],
        "SIZE": hidden,
        "BLOCK": min(_COMBINED_COLUMNS, power_of_two(hidden)),
    }
    names = ("rows", "topk_ids", "topk_weights", "out")
    grid = (num_tokens, ceil_div(hidden, constants["BLOCK"]))
    launches.append(
        named_launch(
            combine_experts_kernel, grid, {name: Pointer(name) for name in names}, constants, writes=("out",),
            num_stages=1,
        )
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), tuple(launches), call.outputs(), scratch)


def _align(call: ExpertsCall[ArraySpec], num_tiles: int, tile_rows: int) -> tuple[LaunchPlan, LaunchPlan]:
    names = ("topk_ids", "counts", "sorted_ids", "tile_experts")
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in names},
        "num_pairs": Scalar(call.num_pairs, "i32", specialize=False),
        "num_tiles": Scalar(num_tiles, "i32", specialize=False),
    }
    constants = {
        "NUM_EXPERTS": call.num_experts,
        "BLOCK_E": power_of_two(call.num_experts),
        "BLOCK_M": tile_rows,
        "CHUNK": _CHUNK,
    }
    grid, options = (call.num_experts,), {"num_warps": 8, "num_stages": 1}
    counting = {name: arguments[name] for name in ("topk_ids", "counts", "num_pairs")}
    return (
        named_launch(count_experts_kernel, grid, counting, {"CHUNK": _CHUNK}, writes=("counts",), **options),
        named_launch(align_experts_kernel, grid, arguments, constants, writes=names[2:], **options),
    )


def _product(call: ExpertsCall[ArraySpec], tile: Tile, num_tiles: int, row_tiles: int, *, gated: bool) -> LaunchPlan:
    kernel, bias = ("gate_up_kernel", "gate_up_bias") if gated else ("down_kernel", "down_bias")
    spec = call.arrays()[kernel]
    in_size, out_size = spec.shape[1], spec.shape[2] // (2 if gated else 1)
    x_stride = call.hidden_states.element_strides[0] if gated else in_size
    sorted_before = num_tiles > 0
    arguments: dict[str, Argument] = {
        "x": Pointer("hidden_states" if gated else "gated"),
        "kernel": Pointer(kernel),
        "bias": ABSENT if getattr(call, bias) is None else Pointer(bias),
        "topk_ids": ABSENT if sorted_before else Pointer("topk_ids"),
        "sorted_ids": Pointer("sorted_ids") if sorted_before else ABSENT,
        "tile_experts": Pointer("tile_experts") if sorted_before else ABSENT,
        "out": Pointer("gated" if gated else "rows"),
        "num_pairs": Scalar(call.num_pairs, "i32", specialize=False),
        "num_tiles": Scalar(num_tiles, "i32", specialize=False),
        "x_stride": Scalar(x_stride, "i64"),
        "kernel_expert_stride": Scalar(spec.element_strides[0], "i64"),
        "kernel_row_stride": Scalar(spec.element_strides[1], "i64"),
    }
    constants: dict[str, Any] = {
        "NUM_EXPERTS": call.num_experts,
        "PAIRS_PER_ROW": call.topk_ids.shape[1] if gated else 1,
        "IN": in_size,
        "OUT": out_size,
        "ACTIVATION": call.activation if gated else None,
        "BLOCK_P": 0 if sorted_before else power_of_two(call.num_pairs),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.steps,
        "GROUP_M": _GROUP,
        "HALVES": sorted_before and tile.rows == 128,
    }
    grid = (row_tiles * ceil_div(out_size, tile.columns),)
    return named_launch(
        expert_product_kernel, grid, arguments, constants, writes=("gated" if gated else "rows",),
        num_warps=tile.num_warps, num_stages=tile.num_stages, hot=True,
    )  # fmt: skip
