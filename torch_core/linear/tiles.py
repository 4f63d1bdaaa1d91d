"""Tiles of a linear map of one row on Hopper, by what was measured."""

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


def linear_tile(out_size: int, *, is_gated: bool) -> Tile:
    """Returns the tile for a result of so many columns."""
    if is_gated:
        return Tile(32, 64, 4, 5)
    # Two programs on a multiprocessor, or one.
    return Tile(32, 256, 8, 4 if out_size > 4224 else 6)
