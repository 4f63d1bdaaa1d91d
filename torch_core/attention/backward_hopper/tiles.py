"""The frozen tiles of the Hopper backward kernel; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["WIDE_TILE", "HopperBackwardTile", "hopper_backward_tile"]


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
        heads_together: key/value heads whose programs alternate, at most.
        block_n: keys of a program: 128, or 64 where two warpgroups share the sums of the same keys.
        always_in_turns: programs add to the queries' gradient in order, also where no call asks for it.
    """

    block_m: int
    query_stages: int
    d_out_stages: int
    key_registers: int = 208
    query_registers: int = 72
    load_registers: int = 24
    heads_together: int = 1
    block_n: int = 128
    always_in_turns: bool = False

    @property
    def head_sizes(self) -> tuple[tuple[int, int], ...]:
        """Head sizes of keys, with those of values, that the kernel takes in such a tile."""
        return ((64, 64), (128, 128)) if self.block_n == 128 else ((192, 128), (256, 256))


#: The tile of wide heads.
WIDE_TILE = HopperBackwardTile(64, 2, 2, block_n=64)
# By head size, the tiles from a query length on. Without turns heads of 256 take 1.16 of the time at 512, 0.99 to
# 1.01 of it from 2k up.
_TILES: dict[int, tuple[tuple[int, HopperBackwardTile], ...]] = {
    64: ((0, HopperBackwardTile(64, 4, 4)), (2048, HopperBackwardTile(128, 4, 2, heads_together=4))),
    128: ((0, HopperBackwardTile(64, 4, 2)), (2048, HopperBackwardTile(64, 4, 2, heads_together=2))),
    192: ((0, WIDE_TILE), (4096, replace(WIDE_TILE, heads_together=4))),
    256: ((0, replace(WIDE_TILE, always_in_turns=True)),),
}


def hopper_backward_tile(*, head_size: int, max_query_len: int) -> HopperBackwardTile | None:
    """Returns the tile for a head size, None where there is none.

    Args:
        head_size: elements of a head.
        max_query_len: an upper bound on the query length.

    Example:
        >>> [hopper_backward_tile(head_size=64, max_query_len=n).block_m for n in (512, 8192)]
        [64, 128]
    """
    tiles = [tile for length, tile in _TILES.get(head_size, ()) if length <= max_query_len]
    return tiles[-1] if tiles else None
