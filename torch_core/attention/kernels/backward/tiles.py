"""The frozen tiles of the portable backward kernels: which tile, warps and stages a shape gets; measured on an H200."""

from __future__ import annotations

from torch_core.attention.portable import Tile

# Shared memory of an A100's thread block; smaller devices take smaller tiles.
_LARGE_SHARED_MEMORY = 160 * 1024
# Up to this length two small programs that share a multiprocessor lose less at the edges than a large one.
_SHORT_LEN = 4096


def queries_tile(*, head_padded: int, element_bytes: int, max_len: int, shared_memory: int, drops: bool) -> Tile:
    """Returns the tile for the gradient of the queries.

    `head_padded` is the larger padded head size of key and value, `max_len` an upper bound on the query lengths; if
    weights are dropped, the generator takes registers that large tiles do not have.
    """
    small = shared_memory < _LARGE_SHARED_MEMORY
    if element_bytes == 4:
        return Tile(32, 32, 1, 4) if head_padded <= 64 else Tile(16, 16, 1, 4)
    if head_padded > 128:
        return Tile(64, 32, 1, 4) if small else Tile(128, 32, 2, 8)
    if head_padded <= 64:
        return Tile(64, 64, 3, 4)
    if small or drops or max_len <= _SHORT_LEN:
        return Tile(64, 32, 2 if small else 3, 4)
    return Tile(128, 64, 3, 8)


def keys_tile(*, head_padded: int, element_bytes: int, max_len: int, shared_memory: int, drops: bool) -> Tile:
    """Returns the tile for the gradients of keys and values; the arguments are those of `queries_tile`."""
    small = shared_memory < _LARGE_SHARED_MEMORY
    if element_bytes == 4:
        return Tile(32, 32, 1, 4) if head_padded <= 64 else Tile(16, 16, 1, 4)
    if head_padded > 128:
        return Tile(32, 32, 1, 4) if small else Tile(64, 64, 2, 8)
    if head_padded <= 64 and not drops:
        return Tile(64, 64, 3, 4)
    if small or drops or max_len <= _SHORT_LEN:
        return Tile(32, 64, 2 if small else 3, 4)
    return Tile(64, 128, 3, 8)
