"""The frozen tile tables of attention: which tile, warps, stages and chunk a shape gets; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.plans.operands import ceil_div, power_of_two

__all__ = ["RowsTile", "SplitTile", "chunk_size", "rows_tile", "split_tile"]

_MIN_CHUNK = 128
# Chunks times head programs that a full batch should be cut into: a few for each multiprocessor, so that the last ones
# end together, but not so many that merging them costs more than it balances.
_TARGET_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class RowsTile:
    """Tile of attention_rows_kernel.

    Attributes:
        block_m: rows, query tokens times packed heads.
        block_n: keys of one step.
        num_stages: depth of the software pipeline.
        num_warps: warps of one program.
        maxnreg: limit on registers per thread, None for none.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    maxnreg: int | None = None


@dataclass(frozen=True, slots=True)
class SplitTile:
    """Tile of attention_split_kernel.

    Attributes:
        block_m: rows, query tokens times packed heads.
        block_n: keys of one step.
        num_stages: depth of the software pipeline.
        num_warps: warps of one program.
        prefetch: block ids are loaded one step ahead.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    prefetch: bool = True


def rows_tile(*, rows: int, head_padded: int, key_bytes: int, query_bytes: int, paged: bool, edges: bool) -> RowsTile:
    """Returns the tile for long queries.

    Args:
        rows: an upper bound on the rows of one sequence and key/value head (query tokens times packed heads).
        head_padded: the larger padded head size of key and value.
        key_bytes: bytes of an element of the cache.
        query_bytes: bytes of an element of the query.
        paged: keys are found through a block table.
        edges: every tile is masked (bidirectional ranges).
    """
    block_m = max(16, min(128, power_of_two(rows)))
    if query_bytes == 4:
        # fp32 products are not done by the matrix units: registers hold both operands, so the tiles are small.
        return RowsTile(16 if head_padded > 128 else min(block_m, 32), 32, 2, 4)
    if head_padded > 128:
        return RowsTile(min(block_m, 128), 32 if key_bytes == 1 else 64, 2, 8)
    if block_m < 64:
        return RowsTile(block_m, 64, 3, 4)
    if block_m == 64:
        return RowsTile(64, 64, 3, 4)
    return RowsTile(128, 64, 3, 8)


def split_tile(*, rows: int, head_padded: int, key_bytes: int, query_bytes: int) -> SplitTile:
    """Returns the tile for short queries; arguments as in `rows_tile`."""
    block_m = max(16, power_of_two(rows))
    if query_bytes == 4:
        return SplitTile(block_m, 16 if head_padded > 128 else 32, 3, 4)
    if block_m > 32:
        return SplitTile(block_m, 32 if head_padded > 128 else 64, 3, 4)
    if head_padded > 128:
        return SplitTile(block_m, 32, 3, 4)
    if key_bytes == 1:
        return SplitTile(block_m, 64, 3, 2)
    return SplitTile(block_m, 64, 3, 4)


def chunk_size(*, num_seqs: int, table_tokens: int, head_programs: int) -> int:
    """Returns the keys of one chunk, a power of two: from the padded batch and the table's width, never from lengths.

    Args:
        num_seqs: rows of the block table, padding included.
        table_tokens: tokens that one row of the block table can hold.
        head_programs: programs that one chunk of keys needs.

    Example:
        >>> chunk_size(num_seqs=1, table_tokens=65536, head_programs=8)
        512
    """
    items = num_seqs * table_tokens * head_programs
    return max(_MIN_CHUNK, power_of_two(ceil_div(items, _TARGET_ITEMS)))
