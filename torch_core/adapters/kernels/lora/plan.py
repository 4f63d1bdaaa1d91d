"""The plan of low-rank adapters: two launches, from shapes and dtypes alone."""

from __future__ import annotations

from torch_core.adapters.call import LoraCall
from torch_core.adapters.kernels.lora.kernel import lora_expand_kernel, lora_few_rows_kernel, lora_shrink_kernel
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar

# Up to this number of rows for each slot, tiles are as small as matrix units allow.
_FEW_ROWS = 16
_MANY_ROWS = 64
# Parts of a row's inputs, which programs multiply side by side; the second launch adds them.
_MOST_PARTS = 32
_SMALLEST_PART = 128
# Programs of each multiprocessor that hide the latency of reading.
_PROGRAMS = 6
# Elements of a step of the first product, and of a tile of the second one.
_STEP, _MOST_INPUTS = 1 << 13, 256
_TILE = 1 << 13
# Ranks that a step of the second product multiplies.
_RANKS = 64
# Up to these sizes one launch does both: rows, elements of a slice's first matrix, and about as many programs.
_ONE_LAUNCH_ROWS, _ONE_LAUNCH_SIZE, _ONE_LAUNCH_PROGRAMS = 2, 1 << 17, 64


def plan_lora(call: LoraCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; `y` is written in place."""
    num_rows, in_size = call.x.shape
    num_slots, rank, slices = call.num_slots, call.rank, call.output_slices
    is_wide = call.x.dtype == "float32"
    block_r = max(16, power_of_two(rank))
    block_m = _FEW_ROWS if is_wide or num_rows <= _FEW_ROWS * num_slots else _MANY_ROWS
    # Every slot has at most one tile that is not full.
    tiles = min(num_rows, (num_rows + min(num_slots, num_rows) * (block_m - 1)) // block_m)
    step = _STEP // 2 if is_wide else _STEP
    block_k = max(16, min(_MOST_INPUTS, step // max(block_m, block_r), power_of_two(in_size)))
    wanted = ceil_div(_PROGRAMS * limits.num_sms, tiles * len(slices))
    part = max(_SMALLEST_PART, ceil_div(in_size, min(wanted, _MOST_PARTS)))
    part = ceil_div(part, block_k) * block_k
    num_parts = ceil_div(in_size, part)
    block_n = max(32, min(256, _TILE // max(block_m, min(block_r, _RANKS)), power_of_two(max(slices))))
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in ("x", "y", "lora_a", "lora_b", "inner")},
        "token_indices": Pointer("token_indices_sorted_by_lora_ids"),
        "start_loc": Pointer("lora_token_start_loc"),
        "num_slots": Scalar(num_slots, "i32", specialize=False),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
        "x_stride": Scalar(call.x.element_strides[0], "i64"),
        "y_stride": Scalar(call.y.element_strides[0], "i64"),
    }
    constants = {
        "IN": in_size,
        "RANK": rank,
        "NUM_SLICES": len(slices),
        **{f"SLICE_{index}": size for index, size in enumerate((*slices, 0, 0)[:3])},
        "NUM_PARTS": num_parts,
        "BLOCK_S": power_of_two(num_slots),
        "BLOCK_M": block_m,
        "BLOCK_R": block_r,
        "BLOCK_K": block_k,
        "BLOCK_N": block_n,
        "PART": part,
    }
    if num_rows <= _ONE_LAUNCH_ROWS and block_r * in_size <= _ONE_LAUNCH_SIZE and not is_wide:
        return _in_one_launch(call, arguments, constants)
    columns = sum(ceil_div(size, block_n) for size in slices)
    shrink = named_launch(
        lora_shrink_kernel, (tiles, len(slices), num_parts), arguments, constants, writes=("inner",), num_stages=3,
        hot=True,
    )  # fmt: skip
    expand = named_launch(
        lora_expand_kernel, (columns, tiles), arguments, constants | {"BLOCK_R": min(block_r, _RANKS)}, writes=("y",),
        num_stages=1, num_warps=8 if is_wide or block_m > _FEW_ROWS else 4, hot=True,
    )  # fmt: skip
    return OperationPlan(
        name=call.name,
        inputs=tuple(call.arrays().items()),
        in_place=("y",),
        scratch=(("inner", ArraySpec((num_parts, len(slices), num_rows, rank), "float32")),),
        launches=(shrink, expand),
    )


def _in_one_launch(
    call: LoraCall[ArraySpec], arguments: dict[str, Argument], constants: dict[str, int]
) -> OperationPlan:
    wanted = power_of_two(ceil_div(call.y.shape[1], _ONE_LAUNCH_PROGRAMS))
    block_n = max(64, min(512, wanted, _TILE * 2 // constants["BLOCK_R"]))
    constants |= {"BLOCK_N": block_n, "PART": ceil_div(call.x.shape[1], constants["BLOCK_K"]) * constants["BLOCK_K"]}
    columns = sum(ceil_div(size, block_n) for size in call.output_slices)
    launch = named_launch(
        lora_few_rows_kernel, (columns, call.x.shape[0]), arguments, constants, writes=("y",), num_stages=4, hot=True
    )
    inputs = tuple(call.arrays().items())
    return OperationPlan(name=call.name, inputs=inputs, in_place=("y",), launches=(launch,))
