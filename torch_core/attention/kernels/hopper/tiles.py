"""The frozen tiles of the 16-bit Hopper kernel, and how many heads share one; measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from torch_core.launch.operands import ceil_div

__all__ = [
    "MIN_PACKED_ROWS",
    "REST_SIZES",
    "WARPGROUP_ROWS",
    "HopperTile",
    "hopper_chunk",
    "hopper_pack",
    "hopper_tile",
]

#: Query rows of one product, and so of a warpgroup.
WARPGROUP_ROWS = 64
#: Elements that queries and keys of a head size have more than values: those of DeepSeek's prompts, 128 and 64 rotary.
REST_SIZES = {192: 64}
# From this length on, a tile holds tokens of one head. Shorter queries would leave most of its rows without work.
_LONG_QUERY_LEN = 128
# Heads side by side in a tile of short queries: a warpgroup then still holds 4 tokens.
_MAX_PACK = 16
# What short queries must bring, see `hopper_pack`. Above these bounds Hopper took 0.5 to 0.9 of the portable kernel's
# time in every row of `jattn bench prefill --chunks` on an H200; the bounds themselves are worked out, not measured.
MIN_PACKED_ROWS = 65
_MIN_PACKED_KEYS = 512
_MAX_PACKED_SEQS = 256
# Chunks of keys, in keys: a step of their sizes and the smallest one; what it takes to start a work item; what it takes
# to merge. Among 102 cuts of 9 batches in bfloat16 on an H200 the model's took at most 1.7% longer than the best; e4m3
# was not measured.
_CHUNK_STEP = 128
_MIN_CHUNK = 256
_START_KEYS = 300
_MERGE_KEYS = 600
_MIN_GAIN = 0.95


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Tile of hopper_prefill_kernel.

    Attributes:
        warpgroups: warpgroups that multiply, two or three.
        block_n: keys of one step.
        stages: tiles of keys, and of values, in shared memory: two or four.
        query_stages: query tiles in shared memory.
        consumer_registers: registers of a thread that multiplies.
        producer_registers: registers of a thread that loads.
        ping_pong: warpgroups multiply in turns.
        overlap: a warpgroup's softmax runs beside its own products with values; it then has two tiles of weights.
        kv_heads: key/value heads that are worked on side by side; their keys and values stay in the L2 cache. The
            plan takes the largest divisor of all of them that is no larger.
    """

    warpgroups: int
    block_n: int
    stages: int
    query_stages: int
    consumer_registers: int
    producer_registers: int
    ping_pong: bool = True
    overlap: bool = True
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
    128: (
        (0, HopperTile(2, 64, 4, 2, 232, 48)),
        (2048, HopperTile(3, 64, 4, 2, 160, 32)),
    ),
    192: (
        (0, HopperTile(2, 64, 4, 1, 232, 48)),
        (2048, HopperTile(3, 64, 2, 2, 160, 32, overlap=False)),
    ),
    256: ((0, HopperTile(2, 64, 2, 1, 232, 48, ping_pong=False, kv_heads=1)),),
}


def hopper_tile(*, head_size: int, max_query_len: int) -> HopperTile | None:
    """Returns the tile for a head size, None where there is none.

    Every tile of a head size gives the same bits: a warpgroup takes the same rows through the same tiles of keys.

    Example:
        >>> hopper_tile(head_size=64, max_query_len=512).rows, hopper_tile(head_size=64, max_query_len=8192).rows
        (128, 192)
    """
    tiles = [tile for length, tile in _TILES.get(head_size, ()) if length <= max_query_len]
    return tiles[-1] if tiles else None


def hopper_pack(*, group: int, max_query_len: int, num_seqs: int, keys: int, min_rows: int = MIN_PACKED_ROWS) -> int:
    """Returns the query heads that lie side by side in a tile; 0 where the portable kernel serves the call better.

    Long queries fill tiles head by head. Short ones do with all heads of a group side by side, if the group is a power
    of two: like this, both kernels read the keys of a tile once, and have the same tiles. On an H200 the Hopper kernel
    takes about 15 ns for a key of a tile (two products of 128 rows and 128 columns at 550 TFLOP/s, or 0.5 KiB at the
    speed of the memory: about equal), the portable one 21 to 25. Neither splits keys, so few tiles are no reason for
    the portable kernel. What is: a start that is some microseconds slower (barriers, descriptors, registers moved
    between warps), which 512 keys pay back; and the search for a tile's sequence, about a microsecond for every 32
    sequences. The split kernel, with keys in chunks, serves up to 64 rows before this is asked. Like its chunks, the
    choice follows from padded shapes, never from lengths: `keys` is the width of the block table, or the mean of dense
    keys.

    Example:
        >>> [hopper_pack(group=4, max_query_len=n, num_seqs=8, keys=8192) for n in (16, 64, 512)]
        [0, 4, 1]
    """
    if max_query_len >= _LONG_QUERY_LEN:
        return 1
    pack = min(group, _MAX_PACK)
    worth = max_query_len * pack >= min_rows and keys >= _MIN_PACKED_KEYS and num_seqs <= _MAX_PACKED_SEQS
    return pack if pack > 1 and group & (group - 1) == 0 and worth else 0


def hopper_chunk(*, tiles: int, keys: int, num_sms: int, max_chunks: int) -> int:
    """Returns the keys of a chunk where few tiles leave multiprocessors idle; 0 where keys are not split.

    Programs work through items one after the other, so that the time is that of the program with the most: waves of
    items, times the keys of one and what it takes to start it. All of it is read off padded shapes: a sequence is cut
    at the same keys whatever else is in the batch.

    Args:
        tiles: tiles of query rows of the batch, times heads.
        keys: keys of a sequence, at most: the width of the block table.
        num_sms: multiprocessors of the device.
        max_chunks: chunks that there may be.

    Example:
        >>> [hopper_chunk(tiles=n, keys=8192, num_sms=132, max_chunks=16) for n in (16, 32, 160, 256)]
        [1024, 2048, 2048, 0]
    """

    def cost(chunk: int) -> int:
        waves = ceil_div(tiles * ceil_div(keys, chunk), num_sms)
        return waves * (chunk + _START_KEYS) + (_MERGE_KEYS if chunk < keys else 0)

    parts = range(2, min(keys // _MIN_CHUNK, max_chunks) + 1)
    if tiles == 0 or not parts:
        return 0
    sizes = {ceil_div(ceil_div(keys, n), _CHUNK_STEP) * _CHUNK_STEP for n in parts}
    best = min(sizes, key=lambda size: (cost(size), -size))
    return best if cost(best) <= _MIN_GAIN * cost(keys) else 0
