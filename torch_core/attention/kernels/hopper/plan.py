"""The launch of the 16-bit Hopper prefill kernel, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import array_matrix, copied_launch, copy_descriptor, is_copied, query_descriptor
from torch_core.attention.kernels.hopper.kernel import hopper_prefill_kernel
from torch_core.attention.kernels.hopper.tiles import (
    MIN_PACKED_ROWS,
    REST_SIZES,
    WARPGROUP_ROWS,
    HopperTile,
    hopper_chunk,
    hopper_pack,
    hopper_tile,
)
from torch_core.attention.kernels.split.partials import Chunks, combine_launch
from torch_core.attention.operands import output
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan

__all__ = ["few_tiles_chunks", "hopper_launch", "query_pack", "split_hopper_launches"]

# Bytes that chunks may leave: servers leave little room beside their caches.
_MAX_SCRATCH = 1 << 26


def hopper_launch(
    call: AttentionCall[ArraySpec],
    limits: DeviceLimits,
    *,
    min_query: int,
    tile: HopperTile | None = None,
    pack: int | None = None,
    chunks: Chunks | None = None,
) -> LaunchPlan | None:
    """Plans hopper_prefill_kernel for a call's rows and padding; None where the portable kernel serves them.

    The Hopper kernel takes bfloat16 and float16 with head sizes 64, 128 and 256, or 192 with values of 128, a positive
    scale, causal and window masks, a sink for each head, and scales that are numbers; strides and alignments that the
    copy engine can follow.

    Args:
        call: the call.
        limits: the device.
        min_query: query rows from which on a sequence is served.
        tile: another tile than the table's, for measurements.
        pack: another number of heads side by side than `hopper_pack` says, for measurements; a power of two up to 16
            that divides the group.
        chunks: chunks of keys that are work items of their own, for `combine_launch` to finish; paged calls only.
    """
    tile = tile or hopper_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if pack is None:
        pack = query_pack(call, MIN_PACKED_ROWS)
    rest_size = REST_SIZES.get(call.head_size, 0)
    rest = (WARPGROUP_ROWS, rest_size)
    if tile is None or pack == 0 or (pack > 1 and rest_size) or not _is_served(call, limits, rest_size):
        return None
    query = array_matrix(call, "query", tile.block_n)
    boxes = None if query is None else query_descriptor(call, query, (WARPGROUP_ROWS, call.value_head_size), pack)
    if query is None or boxes is None:
        return None
    query_stride = query.head_stride if pack == 1 else 0
    return copied_launch(
        hopper_prefill_kernel,
        call,
        limits,
        tile,
        {"PACK": pack, "PAGED": isinstance(call, PagedCall), "QUERY_STRIDE": query_stride},
        rows=tile.rows,
        pack=pack,
        block_n=tile.block_n,
        kv_heads=tile.kv_heads if pack == 1 else call.num_kv_heads,
        query=boxes,
        query_rest=copy_descriptor("query", query, rest, call.query.dtype) if rest_size else ABSENT,
        min_query=min_query,
        chunks=chunks,
    )


def split_hopper_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks: `hopper_launch` for all sequences, and the merge.

    Returns:
        The launches and the scratch that they share; None where keys are not split. A call with a `kv_chunk_size`
        asks for bits that do not follow from the number of tiles.
    """
    tile = hopper_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if tile is None or call.kv_chunk_size is not None:
        return None
    # Where the portable kernel would be better at whole rows, a tile holds tokens of one head.
    pack = query_pack(call, MIN_PACKED_ROWS) or 1
    chunks = few_tiles_chunks(call, limits, rows=tile.rows, pack=pack)
    if chunks is None:
        return None
    launch = hopper_launch(call, limits, min_query=1, tile=tile, pack=pack, chunks=chunks)
    if launch is None:
        return None
    return (launch, combine_launch(call, chunks, min_chunks=1)), chunks.scratch(call)


def few_tiles_chunks(call: PagedCall[ArraySpec], limits: DeviceLimits, *, rows: int, pack: int) -> Chunks | None:
    """Returns the chunks of a call whose tiles of `rows` rows, with `pack` heads, leave multiprocessors idle.

    None where its keys are not split.
    """
    query_len, left = ceil_div(call.num_tokens, call.num_seqs), call.spec.window_left
    # A power of two: few variants of the merge for the query lengths of a server's steps.
    max_query = power_of_two(call.max_query_len)
    size = hopper_chunk(
        tiles=call.num_seqs * ceil_div(query_len * pack, rows) * (call.num_heads // pack),
        keys=call.table_tokens if left is None else min(call.table_tokens, left + call.max_query_len),
        num_sms=limits.num_sms,
        max_chunks=_MAX_SCRATCH // (4 * call.num_seqs * max_query * call.num_heads * call.value_head_size),
    )
    chunks = Chunks.of(call, size, max_query) if size else None
    return None if chunks is None or chunks.number == 1 else chunks


def query_pack(call: AttentionCall[ArraySpec], min_rows: int) -> int:
    """Returns the query heads side by side in a tile of a call; 0 where other kernels are better, see `hopper_pack`."""
    width = call.table_tokens if isinstance(call, PagedCall) else call.keys().shape[0] // call.num_seqs
    return hopper_pack(
        group=call.group, max_query_len=call.max_query_len, num_seqs=call.num_seqs, keys=width, min_rows=min_rows
    )


def _is_served(call: AttentionCall[ArraySpec], limits: DeviceLimits, rest_size: int) -> bool:
    return (
        is_copied(call, limits, rest_size=rest_size)
        and call.query.dtype in ("bfloat16", "float16")
        and call.keys().dtype == output(call).dtype == call.query.dtype
    )
