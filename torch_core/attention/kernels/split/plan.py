"""The launches of the split and the combine kernel, tiles and chunks: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.call import PagedCall
from torch_core.attention.kernels.split.kernel import attention_split_kernel
from torch_core.attention.operands import cache_constexprs, make_launch, padded
from torch_core.attention.partials import (
    LARGE_SHARED_MEMORY,
    MERGE_ROOM,
    MIN_CHUNK,
    Chunks,
    combine_launch,
    heads_of_merge,
    rounded_chunk,
)
from torch_core.attention.portable import Tile, is_hot
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.device.dependent import DEPENDENT_ARCH
from torch_core.launch.operands import block_seqs, ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan

# Query tokens times packed heads that one program of the split kernel takes at most; of heads above 256, which fill
# registers, fewer.
_MAX_ROWS, _WIDE_ROWS = 64, {1: 32, 2: 32, 4: 16}
# Three stages of 32 such 16-bit keys and values, read by one program of a multiprocessor.
_WIDE_SHARED_MEMORY = 148_480
# Rows and programs from which on whole rows are better than chunks of 16-bit keys: 64 rows and 512 programs over 8k
# took 493 us on an H200 and 565 in chunks. The number of keys has a limit: one long
# sequence among short ones is better in chunks.
_TALL_ROWS = 32
_MANY_PROGRAMS = 400
_WHOLE_KEYS = 12288
# Rows of a sequence that a mixed batch gives to the split kernel, at most: those of its smallest tile.
_MIXED_ROWS = 16
_MAX_CHUNK = 4096
# A single sequence in a table of more keys times programs is mostly shorter than that: it has one wave of chunks of its
# own. To find them takes longer than to know them: 17.2 instead of 16.7 us for one of 8,192 keys that fills its table.
_WIDE_WORK = 1 << 17
# In a table that is wide enough for several chunks most sequences are shorter, and a long one among them is read by as
# many programs as it has chunks. By bytes of a key's element and the most programs that one chunk of each sequence has:
# keys of a chunk at least, programs of a batch until they are larger, and keys of the sequences that come last.
_SHORTER = {
    1: {64: (512, 256, 256), 128: (1024, 384, 512), 256: (512, 2048, 256), 512: (2048, 2048, 1024)},
    2: {64: (512, 256, 256), 128: (704, 1152, 352), 512: (1024, 4096, 1024), 2048: (1024, 8192, 1024)},
}
# Two waves of programs of 16-bit keys at most are to be whole ones; a multiprocessor has so many places in each.
_PLACES = 3
# Bytes that partial results in such chunks take at most.
_PARTIAL_BYTES = 1 << 26
# If these are few, a long sequence of 16-bit keys has more: chunks, and keys of one. A full batch takes them in runs.
_RUN_CHUNKS, _RUN_LEAST = 8, 1024
# Sequences of more keys come first, if chunks have no least number of keys.
_LONG = 512
# Chunks times head programs that a batch is cut into: one or two full waves of the device. More of them cost more to
# merge than they balance. Small batches get half as many, because each program starts with a chain of cold loads; by
# bytes of a key's element.
_TARGET_PROGRAMS = 256
_SMALL_WORK = {1: 1 << 16, 2: 1 << 17, 4: 1 << 17}
_SMALL_TARGET = 128
# Heads of a merging program at most.
_MOST_HEADS = 8
# Room of a merge by the merging programs on a multiprocessor.
_MERGE_ROOM = {1: MERGE_ROOM, 2: 32 << 10}
# Programs that a launch may have by its static bound: most of them find no work when sequences are much shorter than
# the table is wide, and leave after about a microsecond.
_MAX_PROGRAMS = 8192


def short_query_len(call: PagedCall[ArraySpec]) -> int:
    """Returns the query tokens up to which a sequence goes to the split kernel; 0 for none."""
    if call.mm_prefix_range is not None:
        return 0
    pack = _pack(call)
    if call.max_query_len * pack <= _max_rows(call):
        return 0 if _fills_device(call) else max(1, call.max_query_len)
    if call.num_seqs == 1:
        return 0
    return max(1, _MIXED_ROWS // pack)


def split_launches(
    call: PagedCall[ArraySpec], limits: DeviceLimits, *, max_query: int, zero_padding: bool
) -> tuple[list[LaunchPlan], tuple[tuple[str, ArraySpec], ...]]:
    """Plans the sequences with at most `max_query` query rows: the split kernel and, for several chunks, the combine.

    With `zero_padding` rows of padding are cleared too. Returns the launches, and the scratch that they share.
    """
    pack = _pack(call)
    head_programs = _head_programs(call)
    chunks = _chunks(call, max_query, limits.num_sms)
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query) if zero_padding else 0
    merged_early = chunks.number > 1 and limits.arch >= DEPENDENT_ARCH
    programs = (_programs(call.num_seqs, chunks) + padding) * head_programs
    tile = _tile(call, limits, max_query * pack, call.num_seqs * head_programs, programs <= limits.num_sms)
    # Two programs of a multiprocessor that begin early lie unevenly: 8 x 8192 took a tenth longer.
    begins_early = limits.arch >= DEPENDENT_ARCH and programs <= limits.num_sms
    split = make_launch(
        attention_split_kernel,
        call,
        (programs,),
        {
            **cache_constexprs(call),
            "BLOCK_SEQS": block_seqs(call.num_seqs),
            "LONG": _long(call) if 1 < call.num_seqs <= block_seqs(call.num_seqs) else None,
            "CHUNK": chunks.size,
            "LEAST": chunks.least,
            "FEW": chunks.few,
            "RUNS": chunks.runs,
            "MAX_QUERY": max_query,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "PACK": pack,
            "NUM_KV_HEADS": call.num_kv_heads,
            "ZERO_PADDING": zero_padding,
            "PAIRS": _reads_pairs(call, tile),
            "DEPENDENT": begins_early,
            "MERGED": merged_early,
        },
        # A single query row stands at the last key: nothing is to its right.
        arguments={**chunks.arguments(), **({"window_right": ABSENT, "seq_causal": ABSENT} if max_query == 1 else {})},
        writes=chunks.buffers,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        dependent=begins_early,
        hot=is_hot(call),
    )
    if chunks.number == 1:
        return [split], ()
    heads = heads_of_merge(call.num_seqs * max_query, call.num_heads, _MOST_HEADS)
    merges = ceil_div(call.num_seqs * max_query * call.num_heads // heads, limits.num_sms)
    crowds = merged_early and 2 * programs > limits.num_sms and limits.shared_memory > LARGE_SHARED_MEMORY
    room = _MERGE_ROOM.get(merges, 0) if crowds else 0
    merge = combine_launch(call, chunks, min_chunks=2, heads=heads, dependent=merged_early, room=room)
    return [split, merge], chunks.scratch(call)


def chunk_size(*, num_seqs: int, table_tokens: int, head_programs: int, key_bytes: int) -> int:
    """Returns the keys of a chunk, a multiple of 128: from the padded batch and the table's width, never from lengths.

    The chunks of a full table are of about equal length. Four sizes from one power of two to the next keep the number
    of compiled variants small. A chunk of keys needs `head_programs` programs.

    Example:
        >>> chunk_size(num_seqs=1, table_tokens=65536, head_programs=8, key_bytes=2)
        2048
        >>> chunk_size(num_seqs=16, table_tokens=2112, head_programs=8, key_bytes=2)
        1280
    """
    work = num_seqs * table_tokens * head_programs
    if work <= _SMALL_WORK[key_bytes]:
        return max(MIN_CHUNK, power_of_two(ceil_div(work, _SMALL_TARGET)))
    wanted = max(MIN_CHUNK, min(_MAX_CHUNK, ceil_div(work, _TARGET_PROGRAMS)), ceil_div(work, _MAX_PROGRAMS))
    if wanted >= table_tokens:
        return max(MIN_CHUNK, power_of_two(table_tokens))
    return rounded_chunk(ceil_div(table_tokens, ceil_div(table_tokens, wanted)))


def _tile(call: PagedCall[ArraySpec], limits: DeviceLimits, rows: int, programs: int, is_alone: bool) -> Tile:
    """Returns the tile for `rows` query tokens times packed heads of one program, of as many programs a chunk.

    `is_alone` says that a multiprocessor has one program at most.
    """
    head_padded = _head_padded(call)
    key_bytes = DTYPE_BYTES[call.keys().dtype]
    block_m = max(16, power_of_two(rows))
    if call.query.dtype == "float32":
        if head_padded > 256:
            return Tile(block_m, 16, 1, 8)
        block_n = 32 if head_padded <= 64 or (head_padded == 128 and block_m == 16) else 16
        return Tile(block_m, block_n, 2 if block_m > 32 else 3, 8)
    if head_padded > 256:
        # Two stages fit the shared memory of every device, and nothing spills.
        is_deep = key_bytes == 1 or limits.shared_memory >= _WIDE_SHARED_MEMORY
        return Tile(block_m, 32, 3, 4) if is_deep and block_m == 16 else Tile(block_m, 32, 2, 8)
    if head_padded > 128:
        return Tile(block_m, 32, 3, 4)
    if block_m > 16:
        return Tile(block_m, 64, 3, 4)
    if programs < 512:
        # One program for each multiprocessor, or two: tall tiles must keep enough loads in flight. Those of 128 16-bit
        # elements leave no room for a second program.
        is_small = head_padded <= 64 and programs * call.table_tokens <= _SMALL_WORK[key_bytes]
        tall = key_bytes == 1 or is_alone or is_small
        return Tile(16, 128 if tall else 64, 3, 4)
    if key_bytes == 1:
        return Tile(16, 32, 3, 1) if programs >= 1024 else Tile(16, 64, 3, 2)
    return Tile(16, 64, 2, 2)


def _fills_device(call: PagedCall[ArraySpec]) -> bool:
    """Whether there are enough tall tiles: to write and merge chunks of them would cost more than it balances."""
    return (
        call.kv_chunk_size is None
        and call.max_query_len * _pack(call) > _TALL_ROWS
        and call.num_seqs * _head_programs(call) >= _MANY_PROGRAMS
        and DTYPE_BYTES[call.keys().dtype] == 2
        and _chunk_size(call) < call.table_tokens <= _WHOLE_KEYS
    )


def _programs(num_seqs: int, chunks: Chunks) -> int:
    """Returns the most programs of a head that have keys."""
    most = num_seqs * chunks.number
    return most if chunks.runs is None else min(most, num_seqs + chunks.runs)


def _chunks(call: PagedCall[ArraySpec], max_query: int, num_sms: int) -> Chunks:
    head_programs, size = _head_programs(call), _chunk_size(call)
    sees_all = call.spec.window_left is None and call.spec.attention_chunk is None
    fixed = Chunks.of(call, size, max_query)
    if call.kv_chunk_size is not None or not sees_all:
        return fixed
    programs = call.num_seqs * head_programs
    if call.num_seqs == 1:
        few = ceil_div(_SMALL_TARGET, head_programs)
        if few == 1 or call.table_tokens * programs <= _WIDE_WORK:
            return fixed
        return Chunks(rounded_chunk(ceil_div(call.table_tokens, few)), few, max_query, MIN_CHUNK, few)
    shorter = _shorter(call)
    if shorter is None or fixed.number == 1 or size <= shorter[1]:
        return fixed
    key_bytes = DTYPE_BYTES[call.keys().dtype]
    limit, least, wanted, _ = shorter
    found = programs * ceil_div(call.table_tokens, least)
    if limit == 128 and key_bytes > 1 and found <= 2 * _PLACES * num_sms:
        least = _filling_chunk(call.table_tokens, programs, num_sms)
    row_bytes = 4 * call.num_heads * call.value_head_size
    most = max(1, _PARTIAL_BYTES // (row_bytes * call.num_seqs * max_query))
    few = min(wanted // programs, ceil_div(call.table_tokens, least), most)
    runs, each = None, min(_RUN_CHUNKS, most) // few
    # Sums of more rows take shared memory that another program would have, and those of 8-bit keys registers.
    is_small = max_query * _pack(call) <= 16 and key_bytes > 1
    is_wide = call.num_seqs <= block_seqs(call.num_seqs) and each * few * _RUN_LEAST <= call.table_tokens
    if each > 1 and is_small and is_wide:
        runs, least, few = max(1, wanted // head_programs), _RUN_LEAST, few * each
    elif limit == 64:
        # Sequences that are much shorter than the table leave most of the device idle.
        least = max(MIN_CHUNK, least // 2)
    return Chunks(size, max(fixed.number, few), max_query, least, few, runs)


def _filling_chunk(table_tokens: int, programs: int, num_sms: int) -> int:
    """Returns the keys of a chunk, of `programs` programs, with which a full table fills one or two waves best."""
    best, fullest = 0, 0.0
    for keys in range(1024, 511, -MIN_CHUNK):
        found = programs * ceil_div(table_tokens, keys)
        wave = num_sms if found <= _PLACES * num_sms else _PLACES * num_sms
        full = found / (ceil_div(found, wave) * wave)
        if full > fullest + 0.02:
            best, fullest = keys, full
    return best


def _shorter(call: PagedCall[ArraySpec]) -> tuple[int, int, int, int] | None:
    """Returns the key and the row of `_SHORTER` for a call."""
    programs = call.num_seqs * _head_programs(call)
    sizes = _SHORTER[min(DTYPE_BYTES[call.keys().dtype], 2)]
    return next(((most, *row) for most, row in sizes.items() if programs <= most), None)


def _long(call: PagedCall[ArraySpec]) -> int:
    """Returns the keys above which a sequence comes first."""
    shorter = _shorter(call)
    return _LONG if shorter is None else shorter[3]


def _chunk_size(call: PagedCall[ArraySpec]) -> int:
    return call.kv_chunk_size or chunk_size(
        num_seqs=call.num_seqs,
        table_tokens=max(1, call.table_tokens),
        head_programs=_head_programs(call),
        key_bytes=DTYPE_BYTES[call.keys().dtype],
    )


def _head_programs(call: PagedCall[ArraySpec]) -> int:
    return call.num_kv_heads * ceil_div(call.group, _pack(call))


def _pack(call: PagedCall[ArraySpec]) -> int:
    return min(call.group, _max_rows(call))


def _max_rows(call: PagedCall[ArraySpec]) -> int:
    return _WIDE_ROWS[DTYPE_BYTES[call.query.dtype]] if _head_padded(call) > 256 else _MAX_ROWS


def _head_padded(call: PagedCall[ArraySpec]) -> int:
    return max(padded(call.head_size), padded(call.value_head_size))


def _reads_pairs(call: PagedCall[ArraySpec], tile: Tile) -> bool:
    """8-bit keys and values are read two at a time, but not into tall tiles, which multiply from shared memory."""
    key, value = call.keys(), call.values()
    sizes = (call.head_size, call.value_head_size, call.value_offset)
    return (
        DTYPE_BYTES[key.dtype] == 1
        and call.query.dtype != "float32"
        and tile.block_m < 64
        and min(padded(call.head_size), padded(call.value_head_size)) >= 32
        and key.aligned
        and value.aligned
        and not any(n % 2 for n in (*sizes, *key.element_strides[:-1], *value.element_strides[:-1]))
    )
