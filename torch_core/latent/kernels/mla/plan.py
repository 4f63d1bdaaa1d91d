"""The plan of latent attention: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.attention.kernels.rows.plan import block_seqs
from torch_core.attention.kernels.split.partials import Chunks, combine_launch
from torch_core.attention.operands import cache_constexprs, is_plain, make_launch, operation, padded
from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.latent.call import LatentCall
from torch_core.latent.kernels.mla.kernel import latent_attention_kernel
from torch_core.latent.kernels.mla.tiles import latent_chunk, latent_tile
from torch_core.latent.kernels.mla_few.kernel import few_latent_kernel
from torch_core.latent.kernels.mla_few.plan import few_latent_operands
from torch_core.latent.kernels.mla_few.work import COLUMNS
from torch_core.latent.kernels.mla_hopper.kernel import hopper_latent_kernel
from torch_core.latent.kernels.mla_hopper.plan import hopper_latent_operands
from torch_core.latent.kernels.mla_hopper.work import ROWS
from torch_core.launch.operands import ceil_div, power_of_two
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan, OperationPlan

__all__ = ["plan_latent"]

# Longer queries keep their softmax in registers from the first key to the last: partial results would be larger than
# what they save.
_MAX_SPLIT_QUERY = 8
# Up to so many rows, and below so many tokens of a padded batch, the portable kernel's smallest tile is ahead of the
# Hopper kernel's only one, or not known to be behind: 8 x 8192 took 35.6 and 32.1 us on an H200.
_FEW_ROWS = 16
_MANY_TOKENS = 1 << 16


def plan_latent(call: LatentCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as its fields."""
    max_query = max(1, call.max_query_len)
    rows = max_query * call.num_heads
    rope_size = call.head_size - call.kv_lora_rank
    value_padded, rope_padded = padded(call.value_head_size), padded(rope_size) if rope_size else 0
    tile = latent_tile(
        rows=rows,
        padded=value_padded + rope_padded,
        query_bytes=DTYPE_BYTES[call.query.dtype],
        limits=limits,
    )
    is_small = rows <= _FEW_ROWS and call.num_seqs * call.table_tokens < _MANY_TOKENS
    hopper = None if is_small else hopper_latent_operands(call, limits)
    few = few_latent_operands(call, limits) if rows <= _FEW_ROWS else None
    row_tiles = ceil_div(rows, ROWS.value if hopper else COLUMNS.value if few else tile.block_m)
    # The smallest tile leaves room for a second program on a multiprocessor.
    slots = limits.num_sms * (2 if rows <= _FEW_ROWS and not (hopper or few) else 1)
    chunk = call.kv_chunk_size or latent_chunk(
        num_seqs=call.num_seqs, table_tokens=call.table_tokens, row_tiles=row_tiles, slots=slots
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
        "PACKED": call.is_packed,
        "ROPE_PADDED": rope_padded,
    }
    arguments = chunks.arguments()
    # Every sequence with chunks has a token, so at most the rest of the tokens is padding.
    padding = ceil_div(max(0, call.num_tokens - call.num_seqs), max_query)
    grid = ((call.num_seqs * chunks.number + padding) * row_tiles,)
    if max_query == 1:
        # A single query row stands at the last key: nothing is to its right.
        arguments["window_right"] = ABSENT
    if hopper:
        given, sizes = {**arguments, **hopper[0]}, {**constexprs, **hopper[1]}
        launch = make_launch(
            hopper_latent_kernel,
            call,
            grid,
            sizes,
            arguments=given,
            writes=chunks.buffers,
            num_warps=4,
        )
    elif few:
        given, sizes = {**arguments, **few[0]}, {**constexprs, **few[1]}
        launch = make_launch(few_latent_kernel, call, grid, sizes, arguments=given, writes=chunks.buffers, num_warps=4)
    else:
        launch = make_launch(
            latent_attention_kernel,
            call,
            grid,
            constexprs,
            arguments=arguments,
            writes=chunks.buffers,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            hot=tile.block_m == 16 and is_plain(call) and call.query.dtype != "float32",
        )
    launches: list[LaunchPlan] = [launch]
    if chunks.number > 1:
        launches.append(combine_launch(call, chunks, min_chunks=2))
    return operation(call, tuple(launches), chunks.scratch(call))
