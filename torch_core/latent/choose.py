"""The plan of latent attention: the kernel of a call and its chunks of keys; from shapes, dtypes and options alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.attention.operands import cache_constexprs, make_launch, operation
from torch_core.attention.partials import (
    LARGE_SHARED_MEMORY,
    MERGE_ROOM,
    MIN_CHUNK,
    Chunks,
    combine_launch,
    heads_of_merge,
    rounded_chunk,
)
from torch_core.base.specs import ArraySpec
from torch_core.device.dependent import DEPENDENT_ARCH
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla.plan import latent_chunk, portable_latent
from torch_core.latent.kernels.mla_few.plan import few_latent
from torch_core.latent.kernels.mla_hopper.plan import hopper_latent
from torch_core.latent.operands import LatentKernel
from torch_core.launch.operands import block_seqs, ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, DeviceLimits, OperationPlan

# Longer queries keep their softmax in registers from the first key to the last: partial results would cost more than
# they save.
_MAX_SPLIT_QUERY = 8
# Up to this number of rows, and below this number of tokens of a padded batch, the portable kernel's smallest tile is
# faster than the Hopper kernel's only one, or not known to be slower: 8 x 8192 took 35.6 and 32.1 us on an H200. It is
# slower over blocks of one token, at any size: 1 x 2048 took 13.2 and 12.5 us on an H100.
_FEW_ROWS = 16
_MANY_TOKENS = 1 << 16
# Sequences in a table of more tokens are mostly shorter than that: their chunks follow from their own lengths. To find
# them takes longer than to know them: 39.2 instead of 38.5 us for 8 of 8,192 that fill their table (16 heads, H100).
_WIDE_TABLE = 16384
# In wider tables, with chunks of so many tokens or more and more than one of a sequence, the lengths of up to so many
# sequences say whether one is waited for. 64 of 2,048 would take 64.1 instead of 63.7 us (16 heads, H100).
_SHARED_TABLE, _SHARED_CHUNK, _SHARED_SEQS = 2048, 1024, 256
# Heads of a merging program at most, in a batch that may be uneven.
_MOST_HEADS = 4
# Chunks whose merge begins early where most multiprocessors have a program.
_FEW_CHUNKS = 16


def plan_latent(call: LatentCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as its fields."""
    max_query = max(1, call.max_query_len)
    rows = max_query * call.num_heads
    chosen = _kernel(call, limits, rows)
    row_tiles = ceil_div(rows, chosen.rows)
    slots = limits.num_sms * chosen.programs
    chunk = call.kv_chunk_size or latent_chunk(
        num_seqs=call.num_seqs, table_tokens=call.table_tokens, row_tiles=row_tiles, slots=slots
    )
    if max_query > _MAX_SPLIT_QUERY:
        chunk = max(MIN_CHUNK, power_of_two(call.table_tokens))
    chunks = Chunks.of(call, chunk, max_query)
    sees_all = call.spec.window_left is None and call.spec.attention_chunk is None
    few = min(slots // (call.num_seqs * row_tiles), chunks.number)
    is_wide = call.table_tokens > _WIDE_TABLE and chunk > MIN_CHUNK
    if is_wide and call.kv_chunk_size is None and sees_all and few > 1:
        chunks = replace(chunks, least=MIN_CHUNK, few=few)
    shares = chosen.shares and call.kv_chunk_size is None and sees_all and 1 < call.num_seqs <= _SHARED_SEQS
    if shares and call.table_tokens > _SHARED_TABLE and chunks.number > 1 and chunk >= _SHARED_CHUNK:
        # An even batch needs no chunks for the sake of long sequences. On an H100 half of all programs of 64 rows read
        # 16-bit latents as fast as memory gives.
        share = max(1, slots // row_tiles)
        each = max(1, share // call.num_seqs)
        chunk = rounded_chunk(ceil_div(call.table_tokens, each))
        chunks = replace(
            chunks,
            size=chunk,
            number=max(each, 1 + min(2, ceil_div(share, call.num_seqs))),
            shared=(share, min(share, ceil_div(slots, 2)), max(32, power_of_two(call.num_seqs))),
        )
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query)
    programs = (call.num_seqs * chunks.number + padding) * row_tiles
    # A merge that begins early crowds on the multiprocessors that are free: with four of 132 one of 64 chunks took 1 us
    # longer, in the room that one of few has.
    crowds = 2 * programs > limits.num_sms
    has_place = not crowds or (chunks.number <= _FEW_CHUNKS and limits.shared_memory > LARGE_SHARED_MEMORY)
    merged_early = chunks.number > 1 and limits.arch >= DEPENDENT_ARCH and has_place
    constexprs: dict[str, Any] = {
        **cache_constexprs(call),
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "CHUNK": chunk,
        "LEAST": chunks.least,
        "FEW": chunks.few,
        "SHARED": chunks.shared,
        "MAX_QUERY": max_query,
        "ROW_TILES": row_tiles,
        "NUM_HEADS": call.num_heads,
        "PACKED": call.is_packed,
        "MERGED": merged_early,
        **chosen.constexprs,
    }
    arguments = chunks.arguments()
    if max_query == 1:
        # A single query row stands at the last key: nothing is to its right.
        arguments["window_right"] = ABSENT
    launch = make_launch(
        chosen.kernel,
        call,
        (programs,),
        constexprs,
        arguments={**arguments, **chosen.arguments},
        writes=chunks.buffers,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        hot=chosen.hot,
    )
    if chunks.number == 1:
        return operation(call, (launch,))
    room = MERGE_ROOM if merged_early and crowds else 0
    heads = heads_of_merge(call.num_seqs * max_query, call.num_heads, _MOST_HEADS) if chunks.shared else 1
    merge = combine_launch(call, chunks, min_chunks=2, heads=heads, dependent=merged_early, room=room)
    return operation(call, (launch, merge), chunks.scratch(call))


def _kernel(call: LatentCall[ArraySpec], limits: DeviceLimits, rows: int) -> LatentKernel:
    """Returns the kernel for a call whose sequences have up to `rows` rows (query token, head)."""
    is_few = rows <= _FEW_ROWS
    is_small = is_few and call.block_size > 1 and call.num_seqs * call.table_tokens < _MANY_TOKENS
    return (
        (few_latent(call, limits) if is_few else None)
        or (None if is_small else hopper_latent(call, limits))
        or portable_latent(call, limits, rows)
    )
