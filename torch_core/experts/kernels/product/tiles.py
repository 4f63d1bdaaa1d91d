"""Tile sizes of the experts' products."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_core.launch.operands import power_of_two

#: Up to this number of pairs a program looks up its expert's rows itself, which saves a launch; more are sorted first.
MAX_LOOKED_UP = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of one product."""

    rows: int  # rows, columns: of the result.
    columns: int
    steps: int  # Elements of a row that one step multiplies.
    num_warps: int  # num_warps, num_stages: see LaunchPlan.
    num_stages: int


def expert_tile(num_pairs: int, num_experts: int, in_size: int, dtype: str, *, gated: bool, shared_memory: int) -> Tile:
    """Returns the tile for products of `num_pairs` rows of `in_size` elements, as many of each expert as of any other.

    `gated` ones are two side by side, gate and up, and the tile's columns are those of one of them.
    """
    rows = 16 if num_pairs <= MAX_LOOKED_UP else max(16, min(128, power_of_two(num_pairs // num_experts)))
    if dtype == "float32":
        # No matrix units: the registers of every tile hold its operands.
        return Tile(min(rows, 32), 32, _steps(in_size, 32), 4, 2)
    if rows <= 32:
        # Rows of 128 bytes at least: with 64 reading takes a sixth longer.
        tile = Tile(rows, 64, _steps(in_size, 128), 4, 4) if gated else Tile(rows, 128, _steps(in_size, 64), 8, 4)
    elif rows == 64:
        tile = Tile(rows, 64 if gated else 128, _steps(in_size, 64), 4, 4)
    else:
        tile = Tile(rows, 128 if gated else 256, _steps(in_size, 64), 8, 4)
    stage = 2 * tile.steps * (tile.rows + tile.columns * (2 if gated else 1))
    return replace(tile, num_stages=max(1, min(tile.num_stages, shared_memory // stage)))


def _steps(in_size: int, limit: int) -> int:
    """Returns the largest power of two up to a limit that divides a row, and at least 32 where none does."""
    return max(min(32, limit), min(limit, in_size & -in_size))
