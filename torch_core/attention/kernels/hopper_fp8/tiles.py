"""The frozen tiles of the e4m3 Hopper kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.hopper_prefill import WARPGROUP_ROWS, tile_for_length

#: Keys of one step.
BLOCK_N = 128
#: Rows that the heads of a short query must bring, see `hopper_pack`. With 32 and 64 of them whole rows took 0.32 to
#: 0.98 of the split kernel's time on an H200 (4 to 128 sequences over 512 to 8k keys; 1.14 with 4 over 8k, which are
#: cut now), with 16 0.93 to 1.25.
MIN_PACKED_ROWS = 32


@dataclass(frozen=True, slots=True)
class HopperFp8Tile:
    """Tile of hopper_fp8_prefill_kernel: 128 keys a step."""

    warpgroups: int  # Warpgroups that multiply, two or three, of 64 query rows each.
    stages: int  # Tiles of keys, and of transposed values, in shared memory.
    raw_stages: int  # Tiles of values as they lie in the cache.
    query_stages: int  # Query tiles in shared memory.
    consumer_registers: int  # Registers of a thread that multiplies.
    transposer_registers: int  # Registers of a thread that transposes values.
    producer_registers: int  # Registers of a thread that loads.
    transposer_warps: int = 4  # Warps that transpose values.
    overlap: bool = True  # A warpgroup's softmax runs during its own products with values.

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * WARPGROUP_ROWS


# Measured on an H200; by head size, the tiles from a query length on. Three warpgroups keep the exponential unit
# busier, and leave more rows of short queries without work. With heads of 256 a thread's sums and scores leave no
# registers for an overlap, nor the other warps more than these; two tiles of queries are worth more than two of values
# as they lie in the cache.
_TILES: dict[int, tuple[tuple[int, HopperFp8Tile], ...]] = {
    64: (
        (0, HopperFp8Tile(2, 4, 2, 2, 208, 72, 24)),
        (2048, HopperFp8Tile(3, 4, 2, 2, 152, 56, 24, transposer_warps=2, overlap=False)),
    ),
    128: ((0, HopperFp8Tile(2, 2, 2, 2, 208, 72, 24)),),
    256: ((0, HopperFp8Tile(2, 2, 1, 2, 224, 40, 24, overlap=False)),),
}


def hopper_fp8_tile(*, head_size: int, max_query_len: int) -> HopperFp8Tile | None:
    """Returns the tile for a head size, None where there is none. All tiles of a head size give the same bits.

    Example:
        >>> [hopper_fp8_tile(head_size=64, max_query_len=n).rows for n in (512, 8192)]
        [128, 192]
    """
    return tile_for_length(_TILES.get(head_size, ()), max_query_len)
