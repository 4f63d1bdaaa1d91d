"""Tiles of rows of one slot, as `LoraCall.lora_tiles` has them."""

from __future__ import annotations

from typing import Any

#: Rows of a tile; those of an entry of the table begin at this number.
TILE_ROWS = 16


def most_tiles(num_rows: int, groups: int, tile_rows: int) -> int:
    """Returns the most tiles of rows there may be: every group of rows has at most one that is not full."""
    return min(num_rows, (num_rows + min(groups, num_rows) * (tile_rows - 1)) // tile_rows)


def row_tiles(order: Any, starts: Any, xp: Any) -> Any:
    """Returns `LoraCall.lora_tiles`, int32[num_tiles, 2 * TILE_ROWS], found by comparisons.

    Args:
        order: `token_indices_sorted_by_lora_ids`, at least one row.
        starts: `lora_token_start_loc`.
        xp: numpy or jax.numpy, whose arrays they are.

    Example:
        >>> import numpy as np
        >>> row_tiles(np.array([2, 0, 3, 1]), np.array([0, 1, 3]), np)[:, :3].tolist()
        [[0, 0, 1], [1, 1, 3], [2, 3, 4]]
    """
    num_rows, size = order.shape[0], starts.shape[0]
    groups, tiles, lanes = (
        xp.arange(n, dtype=xp.int32) for n in (size, most_tiles(num_rows, size, TILE_ROWS), TILE_ROWS)
    )
    ends = xp.append(starts[1:], xp.asarray([num_rows], xp.int32))
    counts = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
    before = xp.where(groups[:, None] > groups, counts, 0).sum(1, dtype=xp.int32)
    slots = (before + counts <= tiles[:, None]).sum(1, dtype=xp.int32)
    known = xp.minimum(slots, size - 1)
    first = starts[known] + (tiles - before[known]) * TILE_ROWS
    head = xp.stack([slots, first, ends[known]], 1)
    rows = order[xp.minimum(first[:, None] + lanes, num_rows - 1)]
    return xp.concatenate([xp.pad(head, ((0, 0), (0, TILE_ROWS - 3))), rows], 1).astype(xp.int32)
