"""The frozen tiles of the Hopper backward kernel; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_N", "HopperBackwardTile", "hopper_backward_tile"]

#: Keys of a program: 64 for each of two warpgroups.
BLOCK_N = 128


@dataclass(frozen=True, slots=True)
class HopperBackwardTile:
    """Tile of hopper_backward_kernel.

    Attributes:
        block_m: queries of one step.
        query_stages: tiles of queries in shared memory: two or four.
        d_out_stages: tiles of output gradients in shared memory: two or four.
        key_registers: registers of a thread that works on the gradients of keys and values.
        query_registers: registers of a thread that works on the gradient of queries.
        load_registers: registers of the other threads.
    """

    block_m: int
    query_stages: int
    d_out_stages: int
    key_registers: int = 208
    query_registers: int = 72
    load_registers: int = 24


_TILES = {64: HopperBackwardTile(128, 4, 2), 128: HopperBackwardTile(64, 4, 2)}


def hopper_backward_tile(head_size: int) -> HopperBackwardTile | None:
    """Returns the tile for a head size, None where there is none.

    Example:
        >>> hopper_backward_tile(128).block_m
        64
    """
    return _TILES.get(head_size)
