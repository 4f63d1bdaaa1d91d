"""The frozen tiles of the Hopper backward kernel; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class HopperBackwardTile:
    """Tile of hopper_backward_kernel."""

    block_m: int  # Queries of one step.
    query_stages: int  # Tiles of queries in shared memory: two to four.
    d_out_stages: int  # Tiles of output gradients in shared memory: two to four.
    # Registers of a thread that works on the gradients of keys and values, unless these are one role, which has the
    # registers that the others leave.
    key_registers: int = 208
    query_registers: int = 72  # Registers of a thread that works on the gradient of queries.
    load_registers: int = 24  # Registers of the other threads.
    heads_together: int = 1  # Key/value heads whose programs alternate, at most.
    block_n: int = 128  # Keys of a program: 128, or 64 where two warpgroups share the sums of the same keys.
    role_keys: int = 64  # Keys whose gradients one role works out: 64, or 128 by two warpgroups that keep in step.
    always_in_turns: bool = False  # Programs add to the queries' gradient in order, also where no call asks for it.

    @property
    def head_sizes(self) -> tuple[tuple[int, int], ...]:
        """Head sizes of keys, with those of values, that the kernel takes in such a tile."""
        return ((64, 64), (128, 128), (192, 128)) if self.block_n == 128 else ((256, 256),)


# Of wide heads.
_WIDE = HopperBackwardTile(64, 2, 2, block_n=64)
# Of keys of 192 elements over values of 128.
_UNEVEN = HopperBackwardTile(64, 3, 2, role_keys=128)
# By head size, the tiles from a query length on. Without turns heads of 256 take 1.16 of the time at 512, 0.99 to
# 1.01 of it from 2k up.
_TILES: dict[int, tuple[tuple[int, HopperBackwardTile], ...]] = {
    64: ((0, HopperBackwardTile(64, 4, 4)), (2048, HopperBackwardTile(128, 4, 2, heads_together=4))),
    128: (
        (0, HopperBackwardTile(64, 4, 2, role_keys=128)),
        (2048, HopperBackwardTile(64, 4, 2, heads_together=2, role_keys=128)),
    ),
    192: ((0, _UNEVEN), (4096, replace(_UNEVEN, heads_together=4))),
    256: ((0, replace(_WIDE, always_in_turns=True)),),
}


def hopper_backward_tile(
    *, head_size: int, max_query_len: int, deterministic: bool = True
) -> HopperBackwardTile | None:
    """Returns the tile for a head size, None where there is none.

    Example:
        >>> [hopper_backward_tile(head_size=64, max_query_len=n).block_m for n in (512, 8192)]
        [64, 128]
    """
    tiles = [tile for length, tile in _TILES.get(head_size, ()) if length <= max_query_len]
    if not tiles:
        return None
    # In any order heads of 128 take 0.98 of the time at 8k and 16k if the warpgroups need not keep in step.
    return tiles[-1] if deterministic or head_size != 128 else replace(tiles[-1], role_keys=64)
