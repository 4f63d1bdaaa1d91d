"""The plans of Mamba-2, token by token and chunk by chunk: from shapes, dtypes and options alone."""

from __future__ import annotations

import math
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.state.kernels.mamba.chunks import (
    mamba_pass_kernel,
    mamba_products_kernel,
    mamba_scan_kernel,
    mamba_span_states_kernel,
)
from torch_core.state.kernels.mamba.kernel import mamba_step_kernel
from torch_core.state.mamba_call import MambaChunkScanCall

# A program's part of a state, in registers.
_STATE_ELEMENTS = 4096
_PADDED_ROWS = 16
# Sequences that are not longer go token by token, and so do all of float32, whose chunks do not fit registers.
_FEW_TOKENS = 16
_CHUNK = 64
_LARGEST_STATE = 256
# A pipeline of two chunks needs 87 KB, of the widest states 151 KB. Hopper must have one: without it Triton 3.6 reads
# the transposed keys of a state of 256 columns behind the end of the shared memory.
_LARGE_SHARED_MEMORY = 160 * 1024
# Matrix units take 16 rows and columns and more.
_LEAST_TILE = 16
# Heads of a group whose step sizes are computed together.
_HEADS = 32
# Tokens of a span; one of few numbers, so that few variants are compiled. A sequence in one span needs no launches for
# its spans' states, in several it fills the device.
_SPANS = (8192, 2048, 512)
_WHOLE = 1 << 30
# Programs that fill a multiprocessor.
_PROGRAMS = 4
# The largest float32 stands for infinity.
_LARGEST = 3.4028234663852886e38


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
    least = _LEAST_TILE if in_chunks else 1
    padded, size = (max(least, power_of_two(each)) for each in (call.state_size, call.x.shape[2]))
    rows = min(size, max(least, _STATE_ELEMENTS // padded))
    tiles = (call.num_heads, ceil_div(call.x.shape[2], rows))
    span = _span(call, limits, math.prod(tiles)) if in_chunks else _WHOLE
    scratch = _scratch(call, span) if in_chunks else {}
    arguments = _arguments(call, arrays, results["out"], scratch)
    in_place = tuple(name for name in call.written if name != "out")
    group = call.num_heads // call.num_kv_heads
    constexprs: dict[str, Any] = {
        "NUM_HEADS": call.num_heads,
        "NUM_GROUPS": call.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": call.x.shape[2],
        "STATE_SIZE": call.state_size,
        "STATE_PADDED": padded,
        "SOFTPLUS": call.dt_softplus,
        "MAX_TOKENS": _FEW_TOKENS if in_chunks else 0,
        "MIN_TOKENS": _FEW_TOKENS + 1,
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_HEADS": min(_HEADS, power_of_two(group)),
        "BLOCK_ROWS": rows,
        "BLOCK_T": _PADDED_ROWS,
        "CHUNK": _CHUNK,
        "SPAN": span,
    }

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **{"num_stages": 1, **options})

    launches = [launch(mamba_step_kernel, (call.num_seqs, *tiles), *in_place, "out", hot=is_narrow)]
    if in_chunks:
        chunks, spans = (call.num_tokens // each + call.num_seqs for each in (_CHUNK, span))
        stages = 2 if limits.shared_memory >= _LARGE_SHARED_MEMORY else 1
        launches += [launch(mamba_products_kernel, (chunks, call.num_kv_heads), "products", "steps", "decays")]
        if span != _WHOLE:
            written = ("span_states", "span_decays")
            launches += [
                launch(mamba_span_states_kernel, (spans, *tiles), *written, num_stages=stages, hot=True),
                launch(mamba_pass_kernel, (call.num_seqs, *tiles), "span_states"),
            ]
        launches += [launch(mamba_scan_kernel, (spans, *tiles), *in_place, "out", num_stages=stages, hot=True)]
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        scratch=tuple(scratch.items()), launches=tuple(launches),
    )  # fmt: skip


def _span(call: MambaChunkScanCall[ArraySpec], limits: DeviceLimits, programs: int) -> int:
    """Returns the tokens of a span, given the programs of one sequence in one span."""
    # In a batch of equal sequences as long as the bound, all run at the same time; another batch may be one sequence.
    is_even = call.num_tokens == call.num_seqs * call.max_query_len
    wanted = _PROGRAMS * limits.num_sms / (programs * (call.num_seqs if is_even else 1))
    fitting = [span for span in _SPANS if span < call.max_query_len]
    if wanted <= 1 or not fitting:
        return _WHOLE
    return next((span for span in fitting if wanted * span <= call.max_query_len), fitting[-1])


def _scratch(call: MambaChunkScanCall[ArraySpec], span: int) -> dict[str, ArraySpec]:
    by_head = (call.num_heads, call.num_tokens)
    scratch = {
        # float16 would overflow.
        "products": ArraySpec(
            (call.num_tokens, call.num_kv_heads, _CHUNK), "bfloat16" if call.x.dtype == "bfloat16" else "float32"
        ),
        "steps": ArraySpec(by_head, "float32"),
        "decays": ArraySpec(by_head, "float32"),
    }
    if span != _WHOLE:
        spans = (call.num_tokens // span + call.num_seqs, call.num_heads)
        scratch["span_states"] = ArraySpec((*spans, call.x.shape[2], call.state_size), "float32")
        scratch["span_decays"] = ArraySpec(spans, "float32")
    return scratch


def _arguments(
    call: MambaChunkScanCall[ArraySpec], arrays: dict[str, ArraySpec], out: ArraySpec, scratch: dict[str, ArraySpec]
) -> dict[str, Argument]:
    optional = ("D", "dt_bias", "cache_indices", "has_initial_state", "num_kept_tokens", "states", "span_states")
    least, largest = (min(each, _LARGEST) for each in call.dt_limit)
    return {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *scratch, "out")},
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.states is None else call.states.shape[0], "i32", specialize=False),
        "least_step": Scalar(least, "fp32"),
        "largest_step": Scalar(largest, "fp32"),
        **strides("x", ("token", "head"), call.x),
        **strides("dt", ("token",), call.dt),
        **strides("B", ("token", "group"), call.B),
        **strides("C", ("token", "group"), call.C),
        **strides("states", ("slot", "head", "row"), arrays.get("states", ArraySpec((1, 1, 1, 1), "float32"))),
        **strides("out", ("token", "head"), out),
    }
