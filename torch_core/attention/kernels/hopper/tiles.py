"""The frozen tiles of the 16-bit Hopper prefill kernel, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.hopper_prefill import WARPGROUP_ROWS, tile_for_length

#: Elements that queries and keys of a head size have more than values: those of DeepSeek's prompts, 128 and 64 rotary.
REST_SIZES = {192: 64}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Tile of hopper_prefill_kernel."""

    warpgroups: int  # Warpgroups that multiply, two or three.
    block_n: int  # Keys of one step.
    stages: int  # Tiles of keys, and of values, in shared memory: two or four.
    query_stages: int  # Query tiles in shared memory.
    consumer_registers: int  # Registers of a thread that multiplies.
    producer_registers: int  # Registers of a thread that loads.
    ping_pong: bool = True  # Warpgroups multiply in turns.
    # A warpgroup's softmax runs during its own products with values; it then has two tiles of weights.
    overlap: bool = True
    # Key/value heads that are worked on side by side; their keys and values stay in the L2 cache. The plan takes the
    # largest divisor of all of them that is no larger.
    kv_heads: int = 2

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * WARPGROUP_ROWS


# Measured on an H200 (`jattn bench tune --hopper-tiles`); by head size, the tiles from a query length on. Three
# warpgroups have more softmax to do while one multiplies, and read keys and values a third less often; on short queries
# the taller tile has more rows without work than it gains. All tiles of a head size take keys in the same steps.
_TILES: dict[int, tuple[tuple[int, HopperTile], ...]] = {
    64: (
        (0, HopperTile(2, 128, 4, 2, 232, 48, overlap=False)),
        (2048, HopperTile(3, 128, 4, 2, 160, 32, overlap=False)),
    ),
    128: (
        (0, HopperTile(2, 64, 4, 2, 232, 48)),
        (2048, HopperTile(3, 64, 4, 2, 160, 32)),
    ),
    192: (
        (0, HopperTile(2, 64, 4, 1, 232, 48)),
        (2048, HopperTile(3, 64, 2, 2, 160, 32, overlap=False)),
    ),
    256: ((0, HopperTile(2, 64, 2, 1, 232, 48, ping_pong=False, kv_heads=1)),),
}


def hopper_tile(*, head_size: int, max_query_len: int) -> HopperTile | None:
    """Returns the tile for a head size, None where there is none.

    Every tile of a head size gives the same bits: a warpgroup takes the same rows through the same tiles of keys.

    Example:
        >>> hopper_tile(head_size=64, max_query_len=512).rows, hopper_tile(head_size=64, max_query_len=8192).rows
        (128, 192)
    """
    return tile_for_length(_TILES.get(head_size, ()), max_query_len)
