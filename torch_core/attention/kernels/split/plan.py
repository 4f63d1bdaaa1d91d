"""The launches of the split and the combine kernel: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.attention.call import PagedCall
from torch_core.attention.kernels.split.kernel import attention_split_kernel
from torch_core.attention.kernels.split.tiles import chunk_size, split_tile
from torch_core.attention.operands import cache_constexprs, make_launch, padded
from torch_core.attention.partials import Chunks, combine_launch
from torch_core.attention.portable import Tile, block_seqs, is_hot
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.launch.operands import ceil_div
from torch_core.launch.plan import ABSENT, LaunchPlan

# Query tokens times packed heads that one program of the split kernel takes at most.
_MAX_ROWS = 64
# Rows and programs from which on whole rows are better than chunks of 16-bit keys: 64 rows and 512 programs over 8k
# took 493 us on an H200 and 565 in chunks. The number of keys has a limit: one long
# sequence among short ones is better in chunks.
_TALL_ROWS = 32
_MANY_PROGRAMS = 400
_WHOLE_KEYS = 12288
# Rows of a sequence that a mixed batch gives to the split kernel, at most: those of its smallest tile.
_MIXED_ROWS = 16


def short_query_len(call: PagedCall[ArraySpec]) -> int:
    """Returns the query tokens up to which a sequence goes to the split kernel; 0 for none."""
    if call.mm_prefix_range is not None:
        return 0
    pack = _pack(call)
    if call.max_query_len * pack <= _MAX_ROWS:
        return 0 if _fills_device(call) else max(1, call.max_query_len)
    if call.num_seqs == 1:
        return 0
    return max(1, _MIXED_ROWS // pack)


def split_launches(
    call: PagedCall[ArraySpec], *, max_query: int, zero_padding: bool
) -> tuple[list[LaunchPlan], tuple[tuple[str, ArraySpec], ...]]:
    """Plans the sequences with at most `max_query` query rows: the split kernel and, for several chunks, the combine.

    With `zero_padding` rows of padding are cleared too. Returns the launches, and the scratch that they share.
    """
    pack = _pack(call)
    head_programs = _head_programs(call)
    key_bytes = DTYPE_BYTES[call.keys().dtype]
    tile = split_tile(
        rows=max_query * pack,
        programs=call.num_seqs * head_programs,
        table_tokens=call.table_tokens,
        head_padded=max(padded(call.head_size), padded(call.value_head_size)),
        key_bytes=key_bytes,
        query_bytes=DTYPE_BYTES[call.query.dtype],
    )
    chunk = _chunk_size(call)
    chunks = Chunks.of(call, chunk, max_query)
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query) if zero_padding else 0
    split = make_launch(
        attention_split_kernel,
        call,
        ((call.num_seqs * chunks.number + padding) * head_programs,),
        {
            **cache_constexprs(call),
            "BLOCK_SEQS": block_seqs(call.num_seqs),
            "CHUNK": chunk,
            "MAX_QUERY": max_query,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "PACK": pack,
            "NUM_KV_HEADS": call.num_kv_heads,
            "ZERO_PADDING": zero_padding,
            "PAIRS": _reads_pairs(call, tile),
        },
        # A single query row stands at the last key: nothing is to its right.
        arguments={**chunks.arguments(), **({"window_right": ABSENT, "seq_causal": ABSENT} if max_query == 1 else {})},
        writes=chunks.buffers,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        hot=is_hot(call),
    )
    if chunks.number == 1:
        return [split], ()
    return [split, combine_launch(call, chunks, min_chunks=2)], chunks.scratch(call)


def _fills_device(call: PagedCall[ArraySpec]) -> bool:
    """Whether there are enough tall tiles: to write and merge chunks of them would cost more than it balances."""
    return (
        call.kv_chunk_size is None
        and call.max_query_len * _pack(call) > _TALL_ROWS
        and call.num_seqs * _head_programs(call) >= _MANY_PROGRAMS
        and DTYPE_BYTES[call.keys().dtype] == 2
        and _chunk_size(call) < call.table_tokens <= _WHOLE_KEYS
    )


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
    return min(call.group, _MAX_ROWS)


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
