"""The launch of the e4m3 Hopper prefill kernel, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import is_copied
from torch_core.attention.hopper_prefill import prefill_launch, query_pack, split_prefill_launches
from torch_core.attention.kernels.hopper_fp8.kernel import hopper_fp8_prefill_kernel
from torch_core.attention.kernels.hopper_fp8.tiles import BLOCK_N, MIN_PACKED_ROWS, HopperFp8Tile, hopper_fp8_tile
from torch_core.attention.operands import output
from torch_core.attention.partials import Chunks
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, LaunchPlan

# Key/value heads worked on side by side: their keys and values stay in the L2 cache.
_KV_HEADS = 2


def hopper_fp8_launch(
    call: AttentionCall[ArraySpec],
    limits: DeviceLimits,
    *,
    min_query: int,
    tile: HopperFp8Tile | None = None,
    pack: int | None = None,
    chunks: Chunks | None = None,
) -> LaunchPlan | None:
    """Plans hopper_fp8_prefill_kernel for a call's long queries and padding; None where other kernels serve them.

    The kernel takes e4m3 queries over a paged e4m3 cache and writes bfloat16 or float16; head sizes 64, 128 and 256, a
    positive scale, causal and window masks, a sink for each head, scales of queries, keys and values; strides and
    alignments that the copy engine can follow. Scales must be positive.

    The other arguments are those of `hopper_launch`.
    """
    tile = tile or hopper_fp8_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if pack is None:
        pack = query_pack(call, MIN_PACKED_ROWS)
    if tile is None or pack == 0 or not isinstance(call, PagedCall) or not _is_served(call, limits):
        return None
    return prefill_launch(
        hopper_fp8_prefill_kernel,
        call,
        limits,
        tile,
        block_n=BLOCK_N,
        pack=pack,
        kv_heads=_KV_HEADS,
        min_query=min_query,
        chunks=chunks,
    )


def split_hopper_fp8_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks; see `split_prefill_launches`."""
    tile = hopper_fp8_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    return split_prefill_launches(hopper_fp8_launch, call, limits, tile, MIN_PACKED_ROWS)


def packs_short_fp8(call: PagedCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Whether short queries alone, which the split kernel could take, are better with their heads in tiles here.

    That kernel is slow where e4m3 queries have many rows.
    """
    # Heads of a larger group are in several tiles, which would read the same keys.
    pack = query_pack(call, MIN_PACKED_ROWS)
    return call.kv_chunk_size is None and pack == call.group > 1 and _is_served(call, limits)


def _is_served(call: PagedCall[ArraySpec], limits: DeviceLimits) -> bool:
    return (
        is_copied(call, limits)
        and call.query.dtype == call.keys().dtype == "float8_e4m3fn"
        and output(call).dtype in ("bfloat16", "float16")
    )
