"""Tiles of a linear map of few rows."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tile", "linear_tile"]


class Tile(NamedTuple):
    """What a program has of the kernel at a time.

    Attributes:
        columns: of the result.
        steps: rows of the kernel.
        num_warps: of a program.
        num_stages: tiles in flight.
    """

    columns: int
    steps: int
    num_warps: int
    num_stages: int


def linear_tile(out_size: int, dtype: str, *, is_gated: bool) -> Tile:
    """Returns the tile for a result of so many columns: enough programs for the device, enough bytes in flight."""
    if dtype == "float32":
        return Tile(32, 32, 4, 3)
    if is_gated:
        return Tile(64, 64, 4, 4)
    return Tile(64, 128, 4, 4) if out_size > 4224 else Tile(32, 128, 4, 6)
