"""The launch of the rows kernel and its tiles, measured on an H200: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.kernels.rows.kernel import attention_rows_kernel
from torch_core.attention.operands import cache_constexprs, is_plain, make_launch
from torch_core.attention.portable import Tile, is_hot
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.launch.operands import block_seqs, ceil_div, power_of_two
from torch_core.launch.plan import DeviceLimits, LaunchPlan

# Up to this query length the heads of a tile run side by side: their tiles are of equal length, so that the device
# fills evenly. Beyond it, the tiles of one head do: its keys stay in the L2 cache.
_HEADS_FIRST_LEN = 4096
_MAX_GRID_Y = 65535
# Larger groups fill tiles of rows head by head.
_MAX_PACK = 64
# Bytes of a tile of 64 rows and 32 keys of 512 elements.
_WIDE_SHARED_MEMORY = 196608


def rows_launch(call: AttentionCall[ArraySpec], limits: DeviceLimits, *, min_query: int) -> LaunchPlan:
    """Plans attention_rows_kernel for the sequences with at least `min_query` query rows, and for padding."""
    pack = call.group if call.group <= _MAX_PACK and not call.drops else 1
    constexprs = cache_constexprs(call)
    head_padded, rows = max(constexprs["HEAD_PADDED"], constexprs["VALUE_PADDED"]), max(1, call.max_query_len) * pack
    tile = _wide_tile(call, limits) if head_padded > 256 else _tile(call, rows, head_padded)
    pack = min(pack, tile.block_m)
    tiles = call.num_tokens // (tile.block_m // pack) + call.num_seqs + 1
    head_programs = call.num_kv_heads * ceil_div(call.group, pack)
    heads_first = call.max_query_len <= _HEADS_FIRST_LEN and tiles <= _MAX_GRID_Y
    constexprs |= {
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PACK": pack,
        "PAGED": isinstance(call, PagedCall),
        "IN_ORDER": int(call.batch_invariant),
        "MIN_QUERY": min_query,
        "HEADS_FIRST": heads_first,
        "NUM_RANGES": 0 if call.mm_prefix_range is None else call.mm_prefix_range.shape[1],
    }
    return make_launch(
        attention_rows_kernel, call, (head_programs, tiles) if heads_first else (tiles, head_programs), constexprs,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.maxnreg,
        hot=is_hot(call) and tile.maxnreg is None,
    )  # fmt: skip


def _wide_tile(call: AttentionCall[ArraySpec], limits: DeviceLimits) -> Tile:
    """Returns the tile of heads above 256, whose sums fill registers: one for queries of any length."""
    if call.query.dtype == "float32":
        return Tile(16, 16, 1, 8)
    is_tall = DTYPE_BYTES[call.keys().dtype] == 2 and limits.shared_memory >= _WIDE_SHARED_MEMORY
    return Tile(64 if is_tall else 32, 32, 2, 8)


def _tile(call: AttentionCall[ArraySpec], rows: int, head_padded: int) -> Tile:
    """Returns the tile for at most `rows` query tokens times packed heads of one sequence and key/value head."""
    block_m, is_byte = max(16, min(128, power_of_two(rows))), DTYPE_BYTES[call.keys().dtype] == 1
    if call.batch_invariant and call.query.dtype != "float32":
        # One number of keys in a step; and tiles of fewer rows would be multiplied by another instruction.
        return Tile(max(64, block_m), 32 if head_padded > 128 else 64, 3, 4 if block_m <= 64 else 8)
    if call.query.dtype == "float32":
        # fp32 products are not done by the matrix units: registers hold both operands, so the tiles are small.
        return Tile(min(block_m, 32), 32, 2, 4) if head_padded <= 64 else Tile(min(block_m, 32), 16, 2, 8)
    if block_m < 128:
        return Tile(block_m, 32 if head_padded > 128 else 64, 3, 4)
    if head_padded > 128:
        return Tile(128, 32, 3, 8) if is_byte else Tile(128, 64, 2, 8)
    if is_byte or not is_plain(call):
        return Tile(128, 64, 3, 8)
    # A cap of 128 registers lets two programs share a multiprocessor: one multiplies while the other takes
    # exponentials. It is worth the few spills that it costs.
    if head_padded <= 64:
        return Tile(128, 128, 2, 8, 128) if isinstance(call, PagedCall) else Tile(128, 64, 3, 8, 128)
    if call.max_query_len <= 1024:
        return Tile(128, 32, 3, 8, 128)
    return Tile(128, 64, 2, 8, 128)
