"""The frozen tiles and chunks of the split kernel: which one a shape gets; measured on an H200."""

from __future__ import annotations

from torch_core.attention.portable import Tile
from torch_core.launch.operands import ceil_div, power_of_two

_MIN_CHUNK = 128
_MAX_CHUNK = 4096
# Chunks times head programs that a batch is cut into: one or two full waves of the device. More of them cost more to
# merge than they balance. Small batches get half as many, because each program starts with a chain of cold loads; by
# bytes of a key's element.
_TARGET_PROGRAMS = 256
_SMALL_WORK = {1: 1 << 16, 2: 1 << 17, 4: 1 << 17}
_SMALL_TARGET = 128
# Programs that a launch may have by its static bound: most of them find no work when sequences are much shorter than
# the table is wide, and leave after about a microsecond.
_MAX_PROGRAMS = 8192


def split_tile(
    *, rows: int, programs: int, table_tokens: int, head_padded: int, key_bytes: int, query_bytes: int
) -> Tile:
    """Returns the tile for short queries.

    `rows` are the query tokens times packed heads of one program, `programs` the sequences times head programs; the
    rest is as in `rows_tile`.
    """
    block_m = max(16, power_of_two(rows))
    if query_bytes == 4:
        block_n = 32 if head_padded <= 64 or (head_padded == 128 and block_m == 16) else 16
        return Tile(block_m, block_n, 2 if block_m > 32 else 3, 8)
    if head_padded > 128:
        return Tile(block_m, 32, 3, 4)
    if block_m > 16:
        return Tile(block_m, 64, 3, 4)
    if programs < 512:
        # One program for each multiprocessor, or two: tall tiles must keep enough loads in flight.
        tall = key_bytes == 1 or programs * table_tokens <= _SMALL_WORK[key_bytes]
        return Tile(16, 128 if tall else 64, 3, 4)
    if key_bytes == 1:
        return Tile(16, 32, 3, 1) if programs >= 1024 else Tile(16, 64, 3, 2)
    return Tile(16, 64, 2, 2)


def chunk_size(*, num_seqs: int, table_tokens: int, head_programs: int, key_bytes: int) -> int:
    """Returns the keys of a chunk, a multiple of 128: from the padded batch and the table's width, never from lengths.

    The chunks of a full table are of about equal length. Four sizes from one power of two to the next keep the number
    of compiled variants small. A chunk of keys needs `head_programs` programs.

    Example:
        >>> chunk_size(num_seqs=1, table_tokens=65536, head_programs=8, key_bytes=2)
        2048
        >>> chunk_size(num_seqs=16, table_tokens=2112, head_programs=8, key_bytes=2)
        1280
    """
    work = num_seqs * table_tokens * head_programs
    if work <= _SMALL_WORK[key_bytes]:
        return max(_MIN_CHUNK, power_of_two(ceil_div(work, _SMALL_TARGET)))
    wanted = max(_MIN_CHUNK, min(_MAX_CHUNK, ceil_div(work, _TARGET_PROGRAMS)), ceil_div(work, _MAX_PROGRAMS))
    if wanted >= table_tokens:
        return max(_MIN_CHUNK, power_of_two(table_tokens))
    chunk = ceil_div(table_tokens, ceil_div(table_tokens, wanted))
    step = max(_MIN_CHUNK, power_of_two(chunk) // 8)
    return ceil_div(chunk, step) * step
