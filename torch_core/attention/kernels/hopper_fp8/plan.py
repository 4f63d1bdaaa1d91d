"""The launch of the e4m3 Hopper prefill kernel and its tiles: from shapes, dtypes and limits alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import is_copied
from torch_core.attention.hopper_prefill import (
    WARPGROUP_ROWS,
    longest_query,
    prefill_launch,
    query_pack,
    split_prefill_launches,
    tile_for_length,
)
from torch_core.attention.kernels.hopper_fp8.kernel import hopper_fp8_prefill_kernel
from torch_core.attention.operands import output
from torch_core.attention.partials import Chunks
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, LaunchPlan

# Key/value heads worked on side by side: their keys and values stay in the L2 cache.
_KV_HEADS = 2
#: Keys of one step.
BLOCK_N = 128
#: Rows that the heads of a short query must bring, see `hopper_pack`. With 32 and 64 of them whole rows took 0.32 to
#: 0.98 of the split kernel's time on an H200 (4 to 128 sequences over 512 to 8k keys; 1.14 with 4 over 8k, which are
#: cut now), with 16 0.93 to 1.25.
MIN_PACKED_ROWS = 32


@dataclass(frozen=True, slots=True)
class HopperFp8Tile:
    """Tile of hopper_fp8_prefill_kernel: 128 keys a step."""

    warpgroups: int  # Warpgroups that multiply, two or three, of 64 query rows each.
    stages: int  # Tiles of keys, and of transposed values, in shared memory.
    raw_stages: int  # Tiles of values as they lie in the cache.
    query_stages: int  # Query tiles in shared memory.
    consumer_registers: int  # Registers of a thread that multiplies.
    transposer_registers: int  # Registers of a thread that transposes values.
    producer_registers: int  # Registers of a thread that loads.
    transposer_warps: int = 4  # Warps that transpose values.
    overlap: bool = True  # A warpgroup's softmax runs during its own products with values.

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * WARPGROUP_ROWS


# Measured on an H200; by head size, the tiles from a query length on. Three warpgroups keep the exponential unit
# busier, and leave more rows of short queries without work. With heads of 256 a thread's sums and scores leave no
# registers for an overlap, nor the other warps more than these; two tiles of queries are worth more than two of values
# as they lie in the cache.
_TILES: dict[int, tuple[tuple[int, HopperFp8Tile], ...]] = {
    64: (
        (0, HopperFp8Tile(2, 4, 2, 2, 208, 72, 24)),
        (2048, HopperFp8Tile(3, 4, 2, 2, 152, 56, 24, transposer_warps=2, overlap=False)),
    ),
    128: ((0, HopperFp8Tile(2, 2, 2, 2, 208, 72, 24)),),
    256: ((0, HopperFp8Tile(2, 2, 1, 2, 224, 40, 24, overlap=False)),),
}


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
    tile = tile or hopper_fp8_tile(head_size=call.head_size, max_query_len=longest_query(call))
    if pack is None:
        pack = query_pack(call, MIN_PACKED_ROWS)
    if tile is None or pack == 0 or not isinstance(call, PagedCall) or not _is_served(call, limits):
        return None
    return prefill_launch(
        hopper_fp8_prefill_kernel, call, limits, tile, block_n=BLOCK_N, pack=pack, kv_heads=_KV_HEADS,
        min_query=min_query, chunks=chunks,
    )  # fmt: skip


def split_hopper_fp8_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks; see `split_prefill_launches`."""
    tile = hopper_fp8_tile(head_size=call.head_size, max_query_len=longest_query(call))
    return split_prefill_launches(hopper_fp8_launch, call, limits, tile, MIN_PACKED_ROWS)


def packs_short_fp8(call: PagedCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Whether short queries alone, which the split kernel could take, are better with their heads in tiles here.

    That kernel is slow where e4m3 queries have many rows.
    """
    # Heads of a larger group are in several tiles, which would read the same keys.
    pack = query_pack(call, MIN_PACKED_ROWS)
    return call.kv_chunk_size is None and pack == call.group > 1 and _is_served(call, limits)


def hopper_fp8_tile(*, head_size: int, max_query_len: int) -> HopperFp8Tile | None:
    """Returns the tile for a head size, None where there is none. All tiles of a head size give the same bits.

    Example:
        >>> [hopper_fp8_tile(head_size=64, max_query_len=n).rows for n in (512, 8192)]
        [128, 192]
    """
    return tile_for_length(_TILES.get(head_size, ()), max_query_len)


def _is_served(call: PagedCall[ArraySpec], limits: DeviceLimits) -> bool:
    return (
        is_copied(call, limits)
        and call.query.dtype == call.keys().dtype == "float8_e4m3fn"
        and output(call).dtype in ("bfloat16", "float16")
    )
