"""The plan of latent attention: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.attention.mla.kernel import latent_attention_kernel
from torch_core.attention.mla.tiles import latent_chunk, latent_tile
from torch_core.attention.operands import cache_constexprs, is_plain, make_launch, operation, padded
from torch_core.attention.rows.plan import block_seqs
from torch_core.attention.split.partials import Chunks, combine_launch
from torch_core.calls import LatentCall
from torch_core.plan.operands import ceil_div, power_of_two
from torch_core.plan.plan import ABSENT, DeviceLimits, LaunchPlan, OperationPlan
from torch_core.specs import DTYPE_BYTES, ArraySpec

__all__ = ["plan_latent"]

# Longer queries keep their softmax in registers from the first key to the last: partial results would be larger than
# what they save.
_MAX_SPLIT_QUERY = 8


def plan_latent(call: LatentCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as its fields."""
    max_query = max(1, call.max_query_len)
    rope_size = call.head_size - call.kv_lora_rank
    value_padded, rope_padded = padded(call.value_head_size), padded(rope_size) if rope_size else 0
    tile = latent_tile(
        rows=max_query * call.num_heads,
        padded=value_padded + rope_padded,
        query_bytes=DTYPE_BYTES[call.query.dtype],
        limits=limits,
    )
    row_tiles = ceil_div(max_query * call.num_heads, tile.block_m)
    chunk = call.kv_chunk_size or latent_chunk(
        num_seqs=call.num_seqs, table_tokens=call.table_tokens, row_tiles=row_tiles, num_sms=limits.num_sms
    )
    if max_query > _MAX_SPLIT_QUERY:
        chunk = max(128, power_of_two(call.table_tokens))
    chunks = Chunks.of(call, chunk, max_query)
    constexprs: dict[str, Any] = {
        **cache_constexprs(call),
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "CHUNK": chunk,
        "MAX_QUERY": max_query,
        "ROW_TILES": row_tiles,
        "NUM_HEADS": call.num_heads,
        "ROPE_SIZE": rope_size,
        "ROPE_PADDED": rope_padded,
    }
    arguments = chunks.arguments()
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query)
    launches: list[LaunchPlan] = [
        make_launch(
            latent_attention_kernel,
            call,
            ((call.num_seqs * chunks.number + padding) * row_tiles,),
            constexprs,
            # A single query row stands at the last key: nothing is to its right.
            arguments={**arguments, **({"window_right": ABSENT} if max_query == 1 else {})},
            writes=chunks.buffers,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            hot=is_plain(call) and call.query.dtype != "float32",
        )
    ]
    if chunks.number > 1:
        launches.append(combine_launch(call, chunks, min_chunks=2))
    return operation(call, tuple(launches), chunks.scratch(call))
