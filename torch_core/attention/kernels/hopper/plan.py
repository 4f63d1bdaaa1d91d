"""The launch of the 16-bit Hopper prefill kernel, where it serves a call; from shapes, dtypes and limits alone."""

from __future__ import annotations

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import is_copied
from torch_core.attention.hopper_prefill import (
    MIN_PACKED_ROWS,
    prefill_launch,
    query_pack,
    split_prefill_launches,
)
from torch_core.attention.kernels.hopper.kernel import hopper_prefill_kernel
from torch_core.attention.kernels.hopper.tiles import REST_SIZES, HopperTile, hopper_tile
from torch_core.attention.operands import output
from torch_core.attention.partials import Chunks
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, LaunchPlan


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

    Sequences with at least `min_query` query rows are served. `tile` and `pack`, heads side by side, a power of two up
    to 16 that divides the group, replace those of the tables, for measurements. `chunks` of keys, of paged calls, are
    work items of their own, for `combine_launch` to finish.
    """
    tile = tile or hopper_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if pack is None:
        pack = query_pack(call, MIN_PACKED_ROWS)
    rest_size = REST_SIZES.get(call.head_size, 0)
    if tile is None or pack == 0 or (pack > 1 and rest_size) or not _is_served(call, limits, rest_size):
        return None
    return prefill_launch(
        hopper_prefill_kernel,
        call,
        limits,
        tile,
        block_n=tile.block_n,
        pack=pack,
        kv_heads=tile.kv_heads,
        min_query=min_query,
        chunks=chunks,
    )


def split_hopper_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks; see `split_prefill_launches`."""
    tile = hopper_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    return split_prefill_launches(hopper_launch, call, limits, tile, MIN_PACKED_ROWS)


def _is_served(call: AttentionCall[ArraySpec], limits: DeviceLimits, rest_size: int) -> bool:
    return (
        is_copied(call, limits, rest_size=rest_size)
        and call.query.dtype in ("bfloat16", "float16")
        and call.keys().dtype == output(call).dtype == call.query.dtype
    )
