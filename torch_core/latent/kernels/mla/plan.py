"""The launch of the portable latent kernel, its tiles and chunks; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.operands import is_plain, padded
from torch_core.attention.partials import rounded_chunk
from torch_core.attention.portable import Tile
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla.kernel import latent_attention_kernel
from torch_core.latent.operands import LatentKernel
from torch_core.launch.operands import ceil_div
from torch_core.launch.plan import DeviceLimits

_LONG_CHUNK = 4096
# Programs that a launch may have by its static bound, beyond those that run at a time: their results take memory
# even where sequences are much shorter than the table is wide.
_MAX_PROGRAMS = 1024


def portable_latent(call: LatentCall[ArraySpec], limits: DeviceLimits, rows: int) -> LatentKernel:
    """Returns the portable kernel for a call whose sequences have up to `rows` rows (query token, head)."""
    rope_size = call.head_size - call.kv_lora_rank
    rope_padded = padded(rope_size) if rope_size else 0
    tile = latent_tile(
        rows=rows,
        padded=padded(call.value_head_size) + rope_padded,
        query_bytes=DTYPE_BYTES[call.query.dtype],
        limits=limits,
    )
    return LatentKernel(
        kernel=latent_attention_kernel,
        rows=tile.block_m,
        constexprs={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "ROPE_SIZE": rope_size,
            "ROPE_PADDED": rope_padded,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # The smallest tile leaves room for a second program on a multiprocessor.
        programs=2 if rows <= 16 else 1,
        hot=tile.block_m == 16 and is_plain(call) and call.query.dtype != "float32",
    )


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
    return rounded_chunk(ceil_div(max(1, table_tokens), chunks))
