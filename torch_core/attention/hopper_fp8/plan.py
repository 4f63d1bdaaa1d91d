"""The launch of the e4m3 Hopper prefill kernel, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.copies import array_matrix, copied_launch, copy_descriptor, is_copied
from torch_core.attention.hopper_fp8.kernel import hopper_fp8_prefill_kernel
from torch_core.attention.hopper_fp8.tiles import BLOCK_N, WARPGROUP_ROWS, HopperFp8Tile, hopper_fp8_tile
from torch_core.attention.operands import keys, output
from torch_core.calls import AttentionCall, PagedCall
from torch_core.plan.plan import DeviceLimits, LaunchPlan
from torch_core.specs import ArraySpec

__all__ = ["hopper_fp8_launch"]

# Shorter queries leave most rows of a tile without work: the portable kernel puts heads side by side there.
_MIN_QUERY_LEN = 128
# Key/value heads worked on side by side: their keys and values stay in the L2 cache.
_KV_HEADS = 2


def hopper_fp8_launch(
    call: AttentionCall[ArraySpec], limits: DeviceLimits, *, min_query: int, tile: HopperFp8Tile | None = None
) -> LaunchPlan | None:
    """Plans hopper_fp8_prefill_kernel for a call's long queries and padding; None where other kernels serve them.

    The kernel takes e4m3 queries over a paged e4m3 cache and writes bfloat16 or float16; head sizes 64, 128 and 256, a
    positive scale, causal and window masks, a sink for each head, scales of queries, keys and values; strides and
    alignments that the copy engine can follow. Scales are positive, as what a unit of a quantised array is worth is.

    Args:
        call: the call.
        limits: the device.
        min_query: query rows from which on a sequence is served.
        tile: another tile than the table's, for measurements.
    """
    tile = tile or hopper_fp8_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if tile is None or not isinstance(call, PagedCall) or not _is_served(call, limits):
        return None
    query = array_matrix(call, "query", BLOCK_N)
    if query is None:
        return None
    return copied_launch(
        hopper_fp8_prefill_kernel,
        call,
        limits,
        tile,
        {"QUERY_STRIDE": query.head_stride},
        rows=tile.rows,
        pack=1,
        block_n=BLOCK_N,
        kv_heads=_KV_HEADS,
        query=copy_descriptor("query", query, (WARPGROUP_ROWS, call.head_size), call.query.dtype),
        min_query=min_query,
    )


def _is_served(call: PagedCall[ArraySpec], limits: DeviceLimits) -> bool:
    return (
        is_copied(call, limits)
        and call.query.dtype == keys(call).dtype == "float8_e4m3fn"
        and output(call).dtype in ("bfloat16", "float16")
        and call.max_query_len >= _MIN_QUERY_LEN
    )
