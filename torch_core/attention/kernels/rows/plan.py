"""The launch of the rows kernel: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.kernels.rows.kernel import attention_rows_kernel
from torch_core.attention.kernels.rows.tiles import rows_tile
from torch_core.attention.operands import cache_constexprs, is_plain, make_launch
from torch_core.attention.portable import block_seqs, is_hot
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.launch.operands import ceil_div
from torch_core.launch.plan import LaunchPlan

# Up to this query length the heads of a tile run side by side: their tiles are of equal length, so that the device
# fills evenly. Beyond it, the tiles of one head do: its keys stay in the L2 cache.
_HEADS_FIRST_LEN = 4096
_MAX_GRID_Y = 65535
# Larger groups fill tiles of rows head by head.
_MAX_PACK = 64


def rows_launch(call: AttentionCall[ArraySpec], *, min_query: int) -> LaunchPlan:
    """Plans attention_rows_kernel for the sequences with at least `min_query` query rows, and for padding."""
    pack = call.group if call.group <= _MAX_PACK and not call.drops else 1
    constexprs = cache_constexprs(call)
    tile = rows_tile(
        rows=max(1, call.max_query_len) * pack,
        max_query_len=call.max_query_len,
        head_padded=max(constexprs["HEAD_PADDED"], constexprs["VALUE_PADDED"]),
        key_bytes=DTYPE_BYTES[call.keys().dtype],
        query_bytes=DTYPE_BYTES[call.query.dtype],
        paged=isinstance(call, PagedCall),
        plain=is_plain(call),
    )
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
        "MIN_QUERY": min_query,
        "HEADS_FIRST": heads_first,
        "NUM_RANGES": 0 if call.mm_prefix_range is None else call.mm_prefix_range.shape[1],
    }
    return make_launch(
        attention_rows_kernel,
        call,
        (head_programs, tiles) if heads_first else (tiles, head_programs),
        constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.maxnreg,
        hot=is_hot(call) and tile.maxnreg is None,
    )
