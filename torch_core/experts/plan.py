"""The plan of a layer of experts: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.experts.call import ExpertsCall
from torch_core.experts.kernels.hopper.kernel import ROWS
from torch_core.experts.kernels.hopper.plan import hopper_product, is_hopper
from torch_core.experts.kernels.one_token.plan import plan_one_token, serves_one_token
from torch_core.experts.kernels.product.align import align_experts_kernel, count_experts_kernel
from torch_core.experts.kernels.product.kernel import combine_experts_kernel, expert_product_kernel
from torch_core.experts.kernels.product.tiles import MAX_LOOKED_UP, Tile, expert_tile
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import (
    ABSENT,
    Argument,
    Descriptor,
    DeviceLimits,
    LaunchPlan,
    OperationPlan,
    Pointer,
    Scalar,
)

# Pairs of a chunk, programs that put pairs in order, elements of a comparison of pairs with experts.
_CHUNK = 256
_MOST_SHARES = 128
_COMPARED = 1 << 15
_COMBINED_COLUMNS = 2048
# Tiles of rows that run at the same time on the same columns.
_GROUP = 8


def plan_experts(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: out."""
    if serves_one_token(call, limits):
        return plan_one_token(call, limits)
    dtype, num_experts = call.hidden_states.dtype, call.num_experts
    hidden = call.hidden_states.shape[1]
    inner = call.down_kernel.shape[1]
    tiles = {
        gated: expert_tile(
            call.num_pairs, num_experts, hidden if gated else inner, dtype, gated=gated,
            shared_memory=limits.shared_memory,
        )
        for gated in (True, False)
    }  # fmt: skip
    tile_rows, num_rows = tiles[True].rows, call.num_pairs
    scratch: dict[str, ArraySpec] = {}
    launches: list[LaunchPlan] = []
    hopper = False
    # As many programs as the kernel has expert by expert, or pair by pair where that is fewer.
    num_tiles, row_tiles = 0, call.num_pairs if power_of_two(call.num_pairs) <= num_experts else num_experts
    if call.num_pairs > MAX_LOOKED_UP:
        row_tiles = num_tiles = (call.num_pairs + min(num_experts, call.num_pairs) * (tile_rows - 1)) // tile_rows
        hopper = tile_rows == ROWS.value and is_hopper(call, limits)
        scratch = {
            "counts": ArraySpec((ceil_div(call.num_pairs, _share(call)), num_experts), "int32"),
            "sorted_ids": ArraySpec((num_tiles * tile_rows,), "int32"),
            "tile_experts": ArraySpec((num_tiles + 1,), "int32"),
        }
        if hopper:
            scratch["slots"], num_rows = ArraySpec((call.num_pairs,), "int32"), num_tiles * tile_rows
        launches += _align(call, num_tiles, tile_rows, has_slots=hopper)
    scratch["rows"] = ArraySpec((num_rows, hidden), dtype)
    if _between(call, is_sorted=hopper) == "gated":
        scratch["gated"] = ArraySpec((num_rows, inner), dtype)
    for gated in (True, False):
        launches.append(
            hopper_product(call, limits, num_tiles)
            if hopper and not gated
            else _product(call, tiles[gated], num_tiles, row_tiles, gated=gated, is_sorted=hopper)
        )
    launches.append(_combine(call, has_slots=hopper))
    return OperationPlan.of(call.name, call.arrays(), tuple(launches), call.outputs(), scratch)


def _combine(call: ExpertsCall[ArraySpec], *, has_slots: bool) -> LaunchPlan:
    num_tokens, hidden = call.hidden_states.shape
    constants = {
        "NUM_EXPERTS": call.num_experts,
        "TOP_K": call.topk_ids.shape[1],
        "SIZE": hidden,
        "BLOCK": min(_COMBINED_COLUMNS, power_of_two(hidden)),
    }
    arguments: dict[str, Argument] = {name: Pointer(name) for name in ("rows", "topk_ids", "topk_weights", "out")}
    arguments["slots"] = Pointer("slots") if has_slots else ABSENT
    grid = (num_tokens, ceil_div(hidden, constants["BLOCK"]))
    num_warps = max(1, min(8, constants["BLOCK"] // 256))
    return named_launch(
        combine_experts_kernel, grid, arguments, constants, writes=("out",), num_warps=num_warps, num_stages=1
    )


def _align(
    call: ExpertsCall[ArraySpec], num_tiles: int, tile_rows: int, *, has_slots: bool
) -> tuple[LaunchPlan, LaunchPlan]:
    share = _share(call)
    num_shares = ceil_div(call.num_pairs, share)
    names = ("topk_ids", "counts", "sorted_ids", "tile_experts")
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in names},
        "slots": Pointer("slots") if has_slots else ABSENT,
        "num_pairs": Scalar(call.num_pairs, "i32", specialize=False),
        "share": Scalar(share, "i32", specialize=False),
        "num_shares": Scalar(num_shares, "i32", specialize=False),
        "num_tiles": Scalar(num_tiles, "i32", specialize=False),
    }
    block_e = power_of_two(call.num_experts)
    constants = {
        "NUM_EXPERTS": call.num_experts,
        "BLOCK_E": block_e,
        "BLOCK_M": tile_rows,
        # As many counts at a time as pairs are compared with experts.
        "BLOCK_R": max(1, min(power_of_two(num_shares), _COMPARED // block_e)),
        "CHUNK": max(16, min(_CHUNK, _COMPARED // block_e)),
    }
    options: dict[str, Any] = {"num_warps": 8, "num_stages": 1}
    # To fill up an expert's last tile takes a program a microsecond.
    programs = max(num_shares, min(call.num_experts, _MOST_SHARES))
    counting = {name: arguments[name] for name in ("topk_ids", "counts", "num_pairs", "share")}
    counted = {name: constants[name] for name in ("NUM_EXPERTS", "BLOCK_E", "CHUNK")}
    written = (*names[2:], "slots") if has_slots else names[2:]
    return (
        named_launch(count_experts_kernel, (num_shares,), counting, counted, writes=("counts",), **options),
        named_launch(align_experts_kernel, (programs,), arguments, constants, writes=written, **options),
    )


def _share(call: ExpertsCall[ArraySpec]) -> int:
    """Returns the pairs that one program puts in order."""
    return _CHUNK * ceil_div(call.num_pairs, _CHUNK * _MOST_SHARES)


def _product(
    call: ExpertsCall[ArraySpec], tile: Tile, num_tiles: int, row_tiles: int, *, gated: bool, is_sorted: bool
) -> LaunchPlan:
    kernel, bias = ("gate_up_kernel", "gate_up_bias") if gated else ("down_kernel", "down_bias")
    between = _between(call, is_sorted=is_sorted)
    inputs, result = ("hidden_states", between) if gated else (between, "rows")
    copies = gated and is_sorted and call.with_activated
    spec = call.arrays()[kernel]
    in_size, out_size = spec.shape[1], call.down_kernel.shape[1 if gated else 2]
    x_stride = call.hidden_states.element_strides[0] if gated else in_size
    sorted_before = num_tiles > 0
    arguments: dict[str, Argument] = {
        "x": Pointer(inputs),
        "kernel": _copied_weights(call, tile) if is_sorted else Pointer(kernel),
        "bias": ABSENT if getattr(call, bias) is None else Pointer(bias),
        "added": Pointer("gate_up_added") if gated and call.gate_up_added is not None else ABSENT,
        "topk_ids": ABSENT if sorted_before else Pointer("topk_ids"),
        "sorted_ids": Pointer("sorted_ids") if sorted_before else ABSENT,
        "tile_experts": Pointer("tile_experts") if sorted_before else ABSENT,
        "activated": Pointer("activated") if copies else ABSENT,
        "out": Pointer(result),
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
        "GATED": gated and call.is_gated,
        "BLOCK_P": 0 if sorted_before else power_of_two(call.num_pairs),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.steps,
        "GROUP_M": _GROUP,
        "HALVES": sorted_before and tile.rows == 128,
        "SORTED": is_sorted,
        "COPIED": is_sorted,
    }
    grid = (row_tiles * ceil_div(out_size, tile.columns),)
    return named_launch(
        expert_product_kernel, grid, arguments, constants,
        writes=("activated", result) if copies else (result,), num_warps=tile.num_warps, num_stages=tile.num_stages,
        hot=True,
    )  # fmt: skip


def _between(call: ExpertsCall[ArraySpec], *, is_sorted: bool) -> str:
    """Returns the buffer between the products: the result that is asked for, if rows are in the order of pairs."""
    return "activated" if call.with_activated and not is_sorted else "gated"


def _copied_weights(call: ExpertsCall[ArraySpec], tile: Tile) -> Descriptor:
    """Returns the first product's kernel as the copy engine sees it, the rows of all experts one after the other."""
    experts, rows, columns = call.gate_up_kernel.shape
    strides = (call.gate_up_kernel.element_strides[1], 1)
    return Descriptor("gate_up_kernel", (experts * rows, columns), strides, (tile.steps, tile.columns))
