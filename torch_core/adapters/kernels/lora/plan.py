"""The plan of low-rank adapters: two launches, from shapes and dtypes alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_core.adapters.call import MAX_SLICES, LoraCall
from torch_core.adapters.kernels.lora.kernel import (
    lora_expand_kernel,
    lora_gated_kernel,
    lora_shrink_kernel,
)
from torch_core.adapters.kernels.lora.places import lora_tiles_kernel
from torch_core.adapters.tiles import TILE_ROWS, most_tiles
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar

# Up to this number of rows, or of rows for each slot, tiles are as small as matrix units allow; from the last number
# on they never are, because prompts may have one adapter for all rows.
_FEW_IN_ALL, _FEW_ROWS, _PROMPTS = 128, 16, 1024
# Parts of inputs, which programs multiply side by side; the second launch adds them, this many elements at once.
_MOST_PARTS, _ELEMENTS = 16, 1 << 13
# Up to this number of groups of rows each program finds its own tile of rows; of more, a launch before finds all.
_SEARCHED = 256
# Numbers of a tile of rows in that launch's table.
_HEAD = 4
# With so few tiles of rows a program may read all its inputs ahead.
_FEW_TILES = 8


class _Tiles(NamedTuple):
    """Sizes of tiles for a number of rows.

    Attributes:
        rows: rows of a tile.
        inputs: inputs of a step of the first product.
        stages: steps of the first product that are read ahead.
        columns: columns of a step of the second product.
        shrinks, expands: programs of each multiprocessor that hide the latency of reading.
        warps: warps of both launches.
    """

    rows: int
    inputs: int
    stages: int
    columns: int
    shrinks: int
    expands: int
    warps: tuple[int, int]


_FEW = _Tiles(rows=16, inputs=128, stages=4, columns=256, shrinks=6, expands=6, warps=(2, 4))
_WIDE = _Tiles(rows=16, inputs=128, stages=2, columns=128, shrinks=6, expands=6, warps=(4, 4))
_MANY = _Tiles(rows=64, inputs=64, stages=4, columns=128, shrinks=2, expands=2, warps=(4, 8))


def plan_lora(call: LoraCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; a given `y` is written in place."""
    num_rows, num_slots = call.num_rows, call.num_slots
    is_few = num_rows <= max(_FEW_IN_ALL, min(_FEW_ROWS * num_slots, _PROMPTS - 1))
    tiles = _WIDE if call.x.dtype in ("float32", "float64") else _FEW if is_few else _MANY
    inputs = {name: array for name, array in call.arrays().items() if name != "out"}
    out = None if call.adds else call.out or call.result
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) for name in ("x", "lora_a", "lora_b", "inner", "out")},
        "y": Pointer("out" if call.y is None else "y"),
        "token_indices": Pointer("token_indices_sorted_by_lora_ids"),
        "start_loc": Pointer({0: "lora_token_start_loc", _HEAD: "tiles"}.get(_entry(call, tiles), "lora_tiles")),
        "num_slots": Scalar(num_slots, "i32", specialize=False),
        "num_rows": Scalar(num_rows, "i32", specialize=False),
    }
    for name, array in (("x", call.x), ("y", call.y or out), ("out", out)):
        if array is not None:
            arguments[f"{name}_stride"] = Scalar(array.element_strides[0], "i64")
    shrink = _shrink(call, arguments, tiles, limits)
    num_parts = shrink.grid[2]
    expand = _expand(call, arguments, tiles, limits, num_parts)
    launches = (shrink, expand)
    scratch = {"inner": ArraySpec((num_parts, num_rows, call.num_heads * _ranks(call)), "float32")}
    if _entry(call, tiles) == _HEAD:
        num_tiles = expand.grid[1]
        scratch["tiles"] = ArraySpec((num_tiles, _HEAD), "int32")
        launches = (_table(call, arguments, tiles, num_tiles), *launches)
    return OperationPlan(
        name=call.name,
        inputs=tuple(inputs.items()),
        in_place=("y",) if call.adds else (),
        outputs=() if out is None else (("out", out),),
        scratch=tuple(scratch.items()),
        launches=launches,
    )


def _shrink(
    call: LoraCall[ArraySpec], arguments: dict[str, Argument], tiles: _Tiles, limits: DeviceLimits
) -> LaunchPlan:
    num_rows, in_size, all_ranks, heads = call.num_rows, call.lora_a.shape[2], _ranks(call), call.num_heads
    num_tiles = most_tiles(num_rows, call.num_slots, tiles.rows)
    block_r = max(16, min(128, power_of_two(all_ranks))) if tiles is _MANY else 16
    block_k = max(16, min(tiles.inputs, power_of_two(in_size)))
    programs = num_tiles * heads * ceil_div(all_ranks, block_r)
    wanted = ceil_div(tiles.shrinks * limits.num_sms, programs)
    # A power of two: of most sizes, all parts are equal.
    part = ceil_div(ceil_div(in_size, min(_MOST_PARTS, 1 << (wanted.bit_length() - 1))), block_k) * block_k
    grid = (num_tiles, heads * ceil_div(all_ranks, block_r), ceil_div(in_size, part))
    # As many programs as the device holds take all of the memory's time by themselves.
    has_time = math.prod(grid) < tiles.shrinks * limits.num_sms
    reads_ahead = tiles is _FEW and limits.arch >= 90 and heads == 1 and has_time
    stages = tiles.stages * (2 if num_tiles <= _FEW_TILES and tiles is _FEW else 1)
    constants = {
        "IN": in_size,
        "ROWS_OF_INPUT": call.rows_of_input,
        "ALL_RANKS": all_ranks,
        "HEADS": heads,
        "FIRST_HEADS": call.first_heads,
        "AHEAD": _ahead(call, grid[1] * grid[2]) if reads_ahead else 0,
        "SECOND": call.lora_b.shape[1] * call.rank,
        "ENTRY": (entry := _entry(call, tiles)),
        "BLOCK_S": 0 if entry else power_of_two(call.num_slots),
        "BLOCK_M": tiles.rows,
        "BLOCK_R": block_r,
        "BLOCK_K": block_k,
        "PART": part,
    }
    return named_launch(
        lora_shrink_kernel, grid, arguments, constants, writes=("inner",), num_warps=tiles.warps[0],
        num_stages=min(stages, ceil_div(part, block_k)) + 1, hot=True,
    )  # fmt: skip


def _expand(
    call: LoraCall[ArraySpec], arguments: dict[str, Argument], tiles: _Tiles, limits: DeviceLimits, num_parts: int
) -> LaunchPlan:
    num_rows, heads, adds, gates = call.num_rows, call.num_heads, call.adds, call.activation is not None
    slices = call.output_slices[:1] if gates else call.output_slices
    groups = _groups(call)
    # Half the rows, so that memory is read in pieces as long as without gates.
    rows = tiles.rows // 2 if gates and tiles is _MANY else tiles.rows
    num_tiles = most_tiles(num_rows, groups, rows)
    programs = num_tiles * heads
    block_r = max(16, power_of_two(call.rank))
    # Ranges of columns within slices need no mask.
    divisor = math.gcd(*slices) & -math.gcd(*slices)
    # Two products at once take the registers of a step twice as wide.
    block_n = tiles.columns // (2 if gates and tiles is not _MANY else 1)
    block_n = min(block_n, (1 << 14) // block_r, divisor if divisor >= 64 else power_of_two(max(slices)))
    block_n = max(16, block_n)
    while tiles is not _MANY and block_n > 64 and programs * ceil_div(sum(slices), block_n) < limits.num_sms:
        block_n //= 2
    # The sums of parts serve several steps, while there are programs enough.
    columns, least = block_n, (_FEW if gates else tiles).expands * limits.num_sms
    # A vocabulary is seldom divisible: the last range of a single layer may end sooner.
    most = slices[0] if len(slices) == 1 and divisor % block_n == 0 and not gates else divisor
    while columns * 2 <= most and programs * ceil_div(sum(slices), columns * 2) >= least:
        columns *= 2
    constants = {
        "RANK": call.rank,
        **{f"SLICE_{index}": size for index, size in enumerate((*slices, *[0] * MAX_SLICES)[:MAX_SLICES])},
        "DIVISOR": divisor,
        "NUM_SLICES": len(slices),
        "HEADS": heads,
        "SECOND_HEADS": call.second_heads,
        "NUM_PARTS": num_parts,
        "ADDS": adds,
        "BLOCK_P": max(1, min(power_of_two(num_parts), _ELEMENTS // (rows * block_r))),
        "ENTRY": (entry := _entry(call, tiles)),
        "BLOCK_S": 0 if entry else power_of_two(groups),
        "BLOCK_M": rows,
        "BLOCK_R": block_r,
        "BLOCK_N": block_n,
        "COLUMNS": columns,
    }
    kernel = lora_gated_kernel if gates else lora_expand_kernel
    return named_launch(
        kernel, (heads * sum(ceil_div(size, columns) for size in slices), num_tiles), arguments, constants,
        writes=("y" if adds else "out",), num_stages=1, num_warps=tiles.warps[1] if block_r <= 64 else 8, hot=True,
    )  # fmt: skip


def _table(call: LoraCall[ArraySpec], arguments: dict[str, Argument], tiles: _Tiles, num_tiles: int) -> LaunchPlan:
    """Plans the search of all tiles of rows."""
    sizes = {"num_groups": _groups(call), "num_tiles": num_tiles}
    more = {name: Scalar(size, "i32", specialize=False) for name, size in sizes.items()}
    pointers = {"start_loc": Pointer("lora_token_start_loc"), "table": Pointer("tiles")}
    constants = {"BLOCK_S": power_of_two(_groups(call)), "BLOCK_M": tiles.rows, "OTHERS": not call.adds}
    return named_launch(
        lora_tiles_kernel, (1,), {**arguments, **more, **pointers}, constants, writes=("tiles",), num_warps=8,
        num_stages=1,
    )  # fmt: skip


def _entry(call: LoraCall[ArraySpec], tiles: _Tiles) -> int:
    """Returns the numbers of a tile of rows in a table; 0 if each program finds its own tile of rows."""
    if call.activation is not None:
        return 0
    if call.lora_tiles is not None and tiles.rows == TILE_ROWS:
        return call.lora_tiles.shape[1]
    return _HEAD if _groups(call) > _SEARCHED else 0


def _groups(call: LoraCall[ArraySpec]) -> int:
    """Returns the groups of rows: slots, and where all rows of a result are written the rows without one."""
    return call.num_slots if call.adds else call.num_slots + 1


def _ranks(call: LoraCall[ArraySpec]) -> int:
    """Returns the ranks of all slices, of one head."""
    return len(call.output_slices) * call.rank


def _ahead(call: LoraCall[ArraySpec], programs: int) -> int:
    """Returns the elements of a slot's second matrix that a program of its first one has the cache read; 0 for none."""
    size, first = call.lora_b.shape[1] * call.rank, _ranks(call) * call.x.shape[1]
    if size <= first:
        return size // programs if size % (8 * programs) == 0 else 0
    # All of a larger one would take the memory's time from the first one.
    is_part = call.num_rows > _FEW_TILES and size % 8 == 0
    return first // 2 // programs // 8 * 8 if is_part else 0
