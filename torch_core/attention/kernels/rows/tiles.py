"""The frozen tiles of the rows kernel: which tile, warps and stages a shape gets; measured on an H200."""

from __future__ import annotations

from torch_core.attention.portable import Tile
from torch_core.launch.operands import power_of_two


def rows_tile(
    *, rows: int, max_query_len: int, head_padded: int, key_bytes: int, query_bytes: int, paged: bool, plain: bool
) -> Tile:
    """Returns the tile for long queries.

    `rows` is an upper bound on the query tokens times packed heads of one sequence and key/value head, `head_padded`
    the larger padded head size of key and value; bytes are those of one element. See `operands.is_plain` for `plain`.
    """
    block_m = max(16, min(128, power_of_two(rows)))
    if query_bytes == 4:
        # fp32 products are not done by the matrix units: registers hold both operands, so the tiles are small.
        return Tile(min(block_m, 32), 32, 2, 4) if head_padded <= 64 else Tile(min(block_m, 32), 16, 2, 8)
    if block_m < 128:
        return Tile(block_m, 32 if head_padded > 128 else 64, 3, 4)
    if head_padded > 128:
        return Tile(128, 32, 3, 8) if key_bytes == 1 else Tile(128, 64, 2, 8)
    if key_bytes == 1 or not plain:
        return Tile(128, 64, 3, 8)
    # A cap of 128 registers lets two programs share a multiprocessor: one multiplies while the other takes
    # exponentials. It is worth the few spills that it costs.
    if head_padded <= 64:
        return Tile(128, 128, 2, 8, 128) if paged else Tile(128, 64, 3, 8, 128)
    if max_query_len <= 1024:
        return Tile(128, 32, 3, 8, 128)
    return Tile(128, 64, 2, 8, 128)
