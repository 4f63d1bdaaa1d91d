"""The launch of the 16-bit Hopper prefill kernel and its tiles: from shapes, dtypes and limits alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import is_copied
from torch_core.attention.hopper_prefill import (
    MIN_PACKED_ROWS,
    WARPGROUP_ROWS,
    longest_query,
    prefill_launch,
    query_pack,
    split_prefill_launches,
    tile_for_length,
)
from torch_core.attention.kernels.hopper.kernel import hopper_prefill_kernel
from torch_core.attention.operands import output
from torch_core.attention.partials import Chunks
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, LaunchPlan

#: Elements that queries and keys of a head size have more than values: those of DeepSeek's prompts, 128 and 64 rotary.
REST_SIZES = {192: 64}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Tile of hopper_prefill_kernel."""

    warpgroups: int  # Warpgroups that multiply, two or three.
    block_n: int  # Keys of one step.
    stages: int  # Tiles of keys, and of values, in shared memory: two or four.
    query_stages: int  # Query tiles in shared memory.
    consumer_registers: int  # Registers of a thread that multiplies.
    producer_registers: int  # Registers of a thread that loads.
    ping_pong: bool = True  # Warpgroups multiply in turns.
    # A warpgroup's softmax runs during its own products with values; it then has two tiles of weights.
    overlap: bool = True
    # Key/value heads that are worked on side by side; their keys and values stay in the L2 cache. The plan takes the
    # largest divisor of all of them that is no larger.
    kv_heads: int = 2

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * WARPGROUP_ROWS


# Measured on an H200 (`jattn bench tune --hopper-tiles`); by head size, the tiles from a query length on. Three
# warpgroups have more softmax to do while one multiplies, and read keys and values a third less often; on short queries
# the taller tile has more rows without work than it gains. All tiles of a head size take keys in the same steps.
_TILES: dict[int, tuple[tuple[int, HopperTile], ...]] = {
    64: (
        (0, HopperTile(2, 128, 4, 2, 232, 48, overlap=False)),
        (2048, HopperTile(3, 128, 4, 2, 160, 32, overlap=False)),
    ),
    128: ((0, HopperTile(2, 64, 4, 2, 232, 48)), (2048, HopperTile(3, 64, 4, 2, 160, 32))),
    192: ((0, HopperTile(2, 64, 4, 1, 232, 48)), (2048, HopperTile(3, 64, 2, 2, 160, 32, overlap=False))),
    256: ((0, HopperTile(2, 64, 2, 1, 232, 48, ping_pong=False, kv_heads=1)),),
}


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
    tile = tile or hopper_tile(head_size=call.head_size, max_query_len=longest_query(call))
    if pack is None:
        pack = query_pack(call, MIN_PACKED_ROWS)
    rest_size = REST_SIZES.get(call.head_size, 0)
    if tile is None or pack == 0 or (pack > 1 and rest_size) or not _is_served(call, limits, rest_size):
        return None
    return prefill_launch(
        hopper_prefill_kernel, call, limits, tile, block_n=tile.block_n, pack=pack, kv_heads=tile.kv_heads,
        min_query=min_query, chunks=chunks,
    )  # fmt: skip


def split_hopper_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks; see `split_prefill_launches`."""
    tile = hopper_tile(head_size=call.head_size, max_query_len=longest_query(call))
    return split_prefill_launches(hopper_launch, call, limits, tile, MIN_PACKED_ROWS)


def hopper_tile(*, head_size: int, max_query_len: int) -> HopperTile | None:
    """Returns the tile for a head size, None where there is none.

    Every tile of a head size gives the same bits: a warpgroup takes the same rows through the same tiles of keys.

    Example:
        >>> hopper_tile(head_size=64, max_query_len=512).rows, hopper_tile(head_size=64, max_query_len=8192).rows
        (128, 192)
    """
    return tile_for_length(_TILES.get(head_size, ()), max_query_len)


def _is_served(call: AttentionCall[ArraySpec], limits: DeviceLimits, rest_size: int) -> bool:
    return (
        is_copied(call, limits, rest_size=rest_size)
        and call.query.dtype in ("bfloat16", "float16")
        and call.keys().dtype == output(call).dtype == call.query.dtype
    )
