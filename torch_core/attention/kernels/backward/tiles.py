"""The frozen tiles of the portable backward kernels: which tile, warps and stages a shape gets; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BackwardTile", "keys_tile", "queries_tile"]

# Shared memory of an A100's thread block; smaller devices take smaller tiles.
_LARGE_SHARED_MEMORY = 160 * 1024
# Up to this length two small programs that share a multiprocessor lose less at the edges than a large one.
_SHORT_LEN = 4096


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Tile of backward_queries_kernel or backward_keys_kernel.

    Attributes:
        block_m: query rows.
        block_n: keys.
        num_stages: depth of the software pipeline.
        num_warps: warps of one program.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int


def queries_tile(
    *, head_padded: int, element_bytes: int, max_len: int, shared_memory: int, drops: bool
) -> BackwardTile:
    """Returns the tile for the gradient of the queries.

    Args:
        head_padded: the larger padded head size of key and value.
        element_bytes: bytes of an element of the query.
        max_len: an upper bound on the query lengths.
        shared_memory: bytes that a thread block may have.
        drops: weights are dropped: the generator takes registers, which large tiles do not have.
    """
    small = shared_memory < _LARGE_SHARED_MEMORY
    if element_bytes == 4:
        return BackwardTile(32, 32, 1, 4) if head_padded <= 64 else BackwardTile(16, 16, 1, 4)
    if head_padded > 128:
        return BackwardTile(64, 32, 1, 4) if small else BackwardTile(128, 32, 2, 8)
    if head_padded <= 64:
        return BackwardTile(64, 64, 3, 4)
    if small or drops or max_len <= _SHORT_LEN:
        return BackwardTile(64, 32, 2 if small else 3, 4)
    return BackwardTile(128, 64, 3, 8)


def keys_tile(*, head_padded: int, element_bytes: int, max_len: int, shared_memory: int, drops: bool) -> BackwardTile:
    """Returns the tile for the gradients of keys and values; the arguments are those of `queries_tile`."""
    small = shared_memory < _LARGE_SHARED_MEMORY
    if element_bytes == 4:
        return BackwardTile(32, 32, 1, 4) if head_padded <= 64 else BackwardTile(16, 16, 1, 4)
    if head_padded > 128:
        return BackwardTile(32, 32, 1, 4) if small else BackwardTile(64, 64, 2, 8)
    if head_padded <= 64 and not drops:
        return BackwardTile(64, 64, 3, 4)
    if small or drops or max_len <= _SHORT_LEN:
        return BackwardTile(32, 64, 2 if small else 3, 4)
    return BackwardTile(64, 128, 3, 8)
