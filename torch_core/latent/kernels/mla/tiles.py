"""The tiles and chunks of the latent kernel: which one a shape gets."""

from __future__ import annotations

from torch_core.attention.portable import Tile
from torch_core.launch.operands import ceil_div, power_of_two
from torch_core.launch.plan import DeviceLimits

_MIN_CHUNK = 128
_LONG_CHUNK = 4096
# Programs that a launch may have by its static bound, beyond those that run at a time: their results take memory
# even where sequences are much shorter than the table is wide.
_MAX_PROGRAMS = 1024


def latent_tile(*, rows: int, padded: int, query_bytes: int, limits: DeviceLimits) -> Tile:
    """Returns the tile for `rows` query tokens times heads, whose padded latents and rotary keys are `padded` long."""
    if query_bytes == 4:
        return Tile(16, 16, 1, 8)
    if rows <= 16:
        return Tile(16, 32, 3, 4)
    # The query and two stages of latents share the memory of a block: a hundred kilobytes on some devices.
    room = limits.shared_memory // (padded * query_bytes)
    if rows <= 32 or room < 64 + 2 * 32:
        return Tile(32, 32, 2, 4)
    # From Blackwell on the compiler keeps more copies of a tile.
    return Tile(64, 64 if room >= 64 + 2 * 64 and limits.arch < 100 else 32, 2, 8)


def latent_chunk(*, num_seqs: int, table_tokens: int, row_tiles: int, slots: int) -> int:
    """Returns the tokens of a chunk, a multiple of 128: from the padded batch and the table's width alone.

    As many chunks as run at a time on the device's `slots`: a few programs more would double the time.

    Example:
        >>> latent_chunk(num_seqs=1, table_tokens=8192, row_tiles=1, slots=264)
        128
        >>> latent_chunk(num_seqs=128, table_tokens=4096, row_tiles=1, slots=264)
        2048
    """
    programs = num_seqs * row_tiles
    chunks = max(1, slots // programs, min(ceil_div(table_tokens, _LONG_CHUNK), _MAX_PROGRAMS // programs))
    chunk = ceil_div(max(1, table_tokens), chunks)
    step = max(_MIN_CHUNK, power_of_two(chunk) // 8)
    return ceil_div(chunk, step) * step
