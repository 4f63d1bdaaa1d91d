"""The plans of both Hopper prefill kernels, as far as they are equal: heads side by side, chunks of keys, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from torch_core.attention.call import AttentionCall, PagedCall
from torch_core.attention.copies import array_matrix, box_descriptor, copy_box, copy_descriptor, query_descriptor
from torch_core.attention.operands import count, make_launch, output
from torch_core.attention.partials import PARTIALS, Chunks, combine_launch
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan

#: Query rows of one product, and so of a warpgroup.
WARPGROUP_ROWS = 64
# From this length on, a tile holds tokens of one head. Shorter queries would leave most of its rows without work.
_LONG_QUERY_LEN = 128
# Heads side by side in a tile of short queries: a warpgroup then still holds 4 tokens.
_MAX_PACK = 16
# Minimum sizes of short queries, see `hopper_pack`. Above these bounds Hopper took 0.5 to 0.9 of the portable kernel's
# time in every row of `jattn bench prefill --chunks` on an H200; the bounds themselves are computed, not measured.
MIN_PACKED_ROWS = 65
_MIN_PACKED_KEYS = 512
_MAX_PACKED_SEQS = 256
# Chunks of keys, in keys: a step of their sizes and the smallest one; the cost of starting a work item; the cost of a
# merge. Among 102 splits of 9 batches in bfloat16 on an H200 the model's choice took at most 1.7% longer than the best;
# e4m3 was not measured.
_CHUNK_STEP = 128
_MIN_CHUNK = 256
_START_KEYS = 300
_MERGE_KEYS = 600
_MIN_GAIN = 0.95
# Limit of the partial results of chunks, in bytes: servers leave little memory in addition to their caches.
_MAX_SCRATCH = 1 << 26

_T = TypeVar("_T")


def tile_for_length(tiles: Sequence[tuple[int, _T]], max_query_len: int) -> _T | None:
    """Returns the last of the tiles that begin at a query length, in ascending order, for this length; None without."""
    return next((tile for length, tile in reversed(tiles) if length <= max_query_len), None)


def longest_query(call: AttentionCall[ArraySpec]) -> int:
    """Returns the query tokens of a sequence at most: no more than keys, for which a table has a width."""
    return min(call.max_query_len, call.table_tokens) if isinstance(call, PagedCall) else call.max_query_len


def prefill_launch(
    kernel: Any,
    call: AttentionCall[ArraySpec],
    limits: DeviceLimits,
    tile: Any,
    *,
    block_n: int,
    pack: int,
    kv_heads: int,
    min_query: int,
    chunks: Chunks | None,
) -> LaunchPlan | None:
    """Plans a Hopper prefill kernel for a call that it serves; None if the copy engine cannot follow its arrays.

    Args:
        kernel: the kernel.
        call: the call.
        limits: the device.
        tile: the kernel's tile, a dataclass with `rows`; its fields are constexprs of the same name.
        block_n: keys of one step.
        pack: query heads side by side in a tile.
        kv_heads: key/value heads worked on side by side, at most, if a tile holds one head.
        min_query: query rows from which on a sequence is served.
        chunks: chunks of keys that are work items of their own; None for whole rows.
    """
    # An array that the kernel has no parameter for does something that it cannot do.
    known = {*kernel.arg_names, *call.buffers(), "out"}
    if not call.arrays().keys() <= known:
        return None
    query, key, value = (array_matrix(call, name, block_n) for name in ("query", "key", "value"))
    items = (call.num_tokens // (tile.rows // pack) + call.num_seqs + 1) * (call.num_heads // pack)
    splitting: dict[str, Argument] = dict.fromkeys((*PARTIALS, "chunk", "max_chunks", "max_query"), ABSENT)
    if chunks is not None:
        items *= chunks.number
        splitting = {**chunks.arguments(), "chunk": count(chunks.size), "max_query": count(chunks.max_query)}
    if query is None or key is None or value is None or key.block_rows != value.block_rows or items >= 2**31:
        return None
    boxes = query_descriptor(call, query, (WARPGROUP_ROWS, call.value_head_size), pack)
    if boxes is None:
        return None
    key_name, value_name = call.buffers()
    size, rest_size, box = call.value_head_size, call.head_size - call.value_head_size, copy_box(call, block_n)
    key_dtype = call.keys().dtype
    # The number of key/value heads worked on side by side divides that of all of them.
    most = min(call.num_kv_heads, kv_heads) if pack == 1 else call.num_kv_heads
    together = max(i for i in range(1, most + 1) if call.num_kv_heads % i == 0)
    return make_launch(
        kernel,
        call,
        (min(items, limits.num_sms),),
        {
            **{name.upper(): value for name, value in asdict(tile).items()},
            "PACK": pack,
            "PAGED": isinstance(call, PagedCall),
            "QUERY_STRIDE": query.head_stride if pack == 1 else 0,
            "NUM_HEADS": call.num_heads,
            "GROUP": call.group,
            "HEAD_SIZE": size,
            "REST_SIZE": rest_size,
            "HEADS_TOGETHER": call.group * together // pack,
            "BLOCK_SIZE": call.block_size if isinstance(call, PagedCall) else 1,
            "BLOCK_ROWS": key.block_rows,
            "BOX": box,
            "MIN_QUERY": min_query,
            "KEY_STRIDE": key.head_stride,
            "VALUE_STRIDE": value.head_stride,
            "VALUE_ROW": value.value_row,
            "OUT_STRIDES": output(call).element_strides[:2],
        },
        arguments={
            **splitting,
            "query": boxes,
            "key_cache": box_descriptor(call, key_name, key, (box, size), key_dtype),
            "value_cache": box_descriptor(call, value_name, value, (box, size), call.values().dtype),
            "query_rest": copy_descriptor("query", query, (WARPGROUP_ROWS, rest_size), call.query.dtype)
            if rest_size
            else ABSENT,
            "key_rest": copy_descriptor(key_name, key, (box, rest_size), key_dtype) if rest_size else ABSENT,
        },
        writes=() if chunks is None else chunks.buffers,
        # Not hot: a few bytes of state outside the loops are spilled.
        num_warps=4,
    )


def split_prefill_launches(
    plan: Callable[..., LaunchPlan | None],
    call: PagedCall[ArraySpec],
    limits: DeviceLimits,
    tile: Any,
    min_packed_rows: int,
) -> tuple[tuple[LaunchPlan, ...], tuple[tuple[str, ArraySpec], ...]] | None:
    """Plans a call with few query tiles over many keys, in chunks: one launch for all sequences, and the merge.

    Args:
        plan: `hopper_launch` or `hopper_fp8_launch`.
        call: the call.
        limits: the device.
        tile: the kernel's tile for the call; None if there is none.
        min_packed_rows: rows from which on the heads of a short query share a tile, see `hopper_pack`.

    Returns:
        The launches and the scratch that they share; None if keys are not split. A call with a `kv_chunk_size`
        asks for bits that do not follow from the number of tiles.
    """
    if tile is None or call.kv_chunk_size is not None:
        return None
    # Where the portable kernel would be better at whole rows, a tile holds tokens of one head.
    pack = query_pack(call, min_packed_rows) or 1
    chunks = _few_tiles_chunks(call, limits, rows=tile.rows, pack=pack)
    if chunks is None:
        return None
    launch = plan(call, limits, min_query=1, tile=tile, pack=pack, chunks=chunks)
    if launch is None:
        return None
    return (launch, combine_launch(call, chunks, min_chunks=1)), chunks.scratch(call)


def query_pack(call: AttentionCall[ArraySpec], min_rows: int) -> int:
    """Returns the query heads side by side in a tile of a call; 0 if other kernels are better, see `hopper_pack`."""
    width = call.table_tokens if isinstance(call, PagedCall) else call.keys().shape[0] // call.num_seqs
    return hopper_pack(
        group=call.group, max_query_len=call.max_query_len, num_seqs=call.num_seqs, keys=width, min_rows=min_rows
    )


def hopper_pack(*, group: int, max_query_len: int, num_seqs: int, keys: int, min_rows: int = MIN_PACKED_ROWS) -> int:
    """Returns the query heads that lie side by side in a tile; 0 if the portable kernel serves the call better.

    Long queries fill tiles head by head. Short ones do with all heads of a group side by side, if the group is a power
    of two: like this, both kernels read the keys of a tile once, and have the same tiles. On an H200 the Hopper kernel
    takes about 15 ns for a key of a tile (two products of 128 rows and 128 columns at 550 TFLOP/s, or 0.5 KiB at the
    speed of the memory: about equal), the portable one 21 to 25. Neither splits keys, so few tiles are no reason for
    the portable kernel. The costs are a start that is some microseconds slower (barriers, descriptors, registers moved
    between warps), which 512 keys repay; and the search for a tile's sequence, about a microsecond for every 32
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
    """Returns the keys of a chunk if few tiles leave multiprocessors idle; 0 if keys are not split.

    Programs work through items one after the other, so that the time is that of the program with the most: waves of
    items, times the keys of one and the cost of its start. All of it follows from padded shapes: a sequence is split at
    the same keys in any batch.

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


def _few_tiles_chunks(call: PagedCall[ArraySpec], limits: DeviceLimits, *, rows: int, pack: int) -> Chunks | None:
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
