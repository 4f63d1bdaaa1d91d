"""The plans of Mamba-2, token by token and chunk by chunk: from shapes, dtypes and options alone."""

from __future__ import annotations

import math
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import DeviceLimits, LaunchPlan, OperationPlan, Scalar
from torch_core.state.kernels.mamba.chunks import (
    mamba_pass_kernel,
    mamba_products_kernel,
    mamba_scan_kernel,
    mamba_span_states_kernel,
)
from torch_core.state.kernels.mamba.kernel import mamba_step_kernel
from torch_core.state.kernels.mamba.parts import (
    LEAST_TILE,
    PASSED_ROWS,
    UNSPILT_STATE,
    WHOLE,
    arguments_of,
    constexprs_of,
    scratch_of,
    span_of,
    tiles_of,
)
from torch_core.state.mamba_call import MambaChunkScanCall

# A program's part of a state, in registers, chunk by chunk.
_CHUNK_ELEMENTS = 8192
# The same and the warps of a program for one token of each sequence, and for several. A row of B of more numbers than a
# program has threads would go through shared memory.
_ONE_TOKEN, _ONE_TOKEN_WIDE, _TOKENS = (4096, 8), (2048, 2), (1024, 1)
_WIDE = 256
# Addresses of a tile's elements then differ by constants, and take few registers.
_CONSTANT_STRIDES = ("x_token_stride", "B_token_stride", "C_token_stride", "out_token_stride", "states_row_stride")
# Programs that a multiprocessor holds.
_RESIDENT = 2
# Sequences that are not longer go token by token, and so do all of float32, whose chunks do not fit registers.
_FEW_TOKENS = 16
_CHUNK = 64
_LARGEST_STATE = 256
# A pipeline of two chunks needs 97 KB, of the widest states 157 KB. Hopper must have one: without it Triton 3.6 reads
# the transposed keys of a state of 256 columns behind the end of the shared memory.
_LARGE_SHARED_MEMORY = 160 * 1024


def plan_mamba_chunk_scan(call: MambaChunkScanCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    is_narrow = call.x.dtype != "float32"
    # The state within a chunk is never computed.
    in_chunks = (
        call.max_query_len > _FEW_TOKENS
        and call.num_kept_tokens is None
        and call.state_size <= _LARGEST_STATE
        and is_narrow
        and call.x.dtype == call.B.dtype == call.C.dtype
    )
    least = LEAST_TILE if in_chunks else 1
    constexprs = constexprs_of(call, _CHUNK, least)
    padded, size = constexprs["STATE_PADDED"], max(least, power_of_two(call.x.shape[2]))
    rows = min(size, max(least, _CHUNK_ELEMENTS // padded))
    tiles = (call.num_heads, ceil_div(call.x.shape[2], rows))
    span = span_of(call, limits, math.prod(tiles), resident=_RESIDENT) if in_chunks else WHOLE
    # Of sequences of several spans; the number of others does not count, each with states of megabytes.
    scratch = scratch_of(call, _CHUNK, span, 2 * call.num_tokens // span + 1) if in_chunks else {}
    arguments = arguments_of(call, arrays, {**scratch, "out": results["out"]})
    in_place = tuple(name for name in call.written if name != "out")
    constexprs |= {
        "MAX_TOKENS": _FEW_TOKENS if in_chunks else 0,
        "MIN_TOKENS": _FEW_TOKENS + 1,
        "ONE_TOKEN": call.max_query_len == 1,
        "BLOCK_ROWS": rows,
        "SPAN": span,
        "BINARY": True,
        **{
            name: each.value
            for name, each in arguments.items()
            if name in _CONSTANT_STRIDES and isinstance(each, Scalar)
        },
    }

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        sizes = constexprs | {"BLOCK_ROWS": options.pop("rows", rows)}
        return named_launch(kernel, grid, arguments, sizes, writes=writes, **{"num_stages": 1, **options})

    elements, warps = _TOKENS
    if call.max_query_len == 1:
        elements, warps = _ONE_TOKEN if padded < _WIDE else _ONE_TOKEN_WIDE
    step_rows = min(size, max(1, elements // padded))
    programs = call.num_seqs * call.num_heads * ceil_div(call.x.shape[2], step_rows)
    options = {"rows": step_rows, "num_warps": warps, "hot": is_narrow}
    launches = [launch(mamba_step_kernel, (programs,), *in_place, "out", **options)]
    if in_chunks:
        chunks, spans = (tiles_of(call, each) for each in (_CHUNK, span))
        stages = 2 if limits.shared_memory >= _LARGE_SHARED_MEMORY else 1
        launches += [launch(mamba_products_kernel, (chunks, call.num_kv_heads), "products", "steps", "decays")]
        if span != WHOLE:
            written, passed = ("span_states", "span_decays"), (call.num_heads, ceil_div(size, PASSED_ROWS))
            launches += [
                launch(mamba_span_states_kernel, (spans, *tiles), *written, num_stages=stages, hot=True),
                launch(mamba_pass_kernel, (call.num_seqs, *passed), "span_states", rows=PASSED_ROWS),
            ]
        is_hot = padded <= UNSPILT_STATE
        launches += [launch(mamba_scan_kernel, (spans, *tiles), *in_place, "out", num_stages=stages, hot=is_hot)]
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        scratch=tuple(scratch.items()), launches=tuple(launches),
    )  # fmt: skip
