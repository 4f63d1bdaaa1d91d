"""The frozen tiles of the e4m3 Hopper kernel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_N", "WARPGROUP_ROWS", "HopperFp8Tile", "hopper_fp8_tile"]

#: Query rows of one product, and keys of one step.
WARPGROUP_ROWS = 64
BLOCK_N = 128


@dataclass(frozen=True, slots=True)
class HopperFp8Tile:
    """Tile of hopper_fp8_prefill_kernel: 128 query rows, 128 keys a step.

    Attributes:
        stages: tiles of keys, and of transposed values, in shared memory.
        raw_stages: tiles of values as they lie in the cache.
        query_stages: query tiles in shared memory.
        consumer_registers: registers of a thread that multiplies.
        transposer_registers: registers of a thread that transposes values.
        producer_registers: registers of a thread that loads.
        ping_pong: warpgroups multiply in turns.
        promote: the sums of each tile of values are added up in float32.
    """

    stages: int
    raw_stages: int
    query_stages: int
    consumer_registers: int
    transposer_registers: int
    producer_registers: int
    ping_pong: bool
    promote: bool


# By head size: what compiles without spills in the loops. Other tiles were not timed.
_TILES = {
    64: HopperFp8Tile(4, 2, 2, 208, 72, 24, False, True),
    128: HopperFp8Tile(2, 2, 2, 208, 72, 24, False, False),
}


def hopper_fp8_tile(head_size: int) -> HopperFp8Tile | None:
    """Returns the tile for a head size, None where there is none."""
    return _TILES.get(head_size)
