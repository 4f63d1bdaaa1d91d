"""The plans of the gated delta rule, token by token and chunk by chunk: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.kernels.delta.chunks import gated_delta_chunks_kernel, gated_delta_systems_kernel
from torch_core.state.kernels.delta.kernel import gated_delta_kernel

# A program's part of a state, in registers.
_STATE_ELEMENTS = 4096
_PADDED_ROWS = 16
# Batches whose sequences are not longer go token by token, and so do float32 and wide heads, whose chunks do not fit
# registers.
_FEW_TOKENS = 32
_CHUNK = 64
_LARGEST_HEAD = 128
# A pipeline of two chunks needs 111 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY = 160 * 1024
# Matrix units take 16 rows and columns and more.
_LEAST_TILE = 16


def plan_gated_delta(call: GatedDeltaCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    is_narrow = call.key.dtype != "float32"
    in_chunks = (
        call.max_query_len > _FEW_TOKENS
        and call.gk is None
        and max(call.key.shape[2], call.value.shape[2]) <= _LARGEST_HEAD
        and is_narrow
        and call.query.dtype == call.key.dtype == call.value.dtype
    )
    in_place = tuple(name for name in call.written if name != "out")
    scratch = _scratch(call) if in_chunks else {}
    arguments = _arguments(call, arrays, results["out"], scratch)
    least = _LEAST_TILE if in_chunks else 1
    padded = max(least, power_of_two(call.key.shape[2]))
    rows = min(max(least, power_of_two(call.value.shape[2])), max(least, _STATE_ELEMENTS // padded))
    constexprs: dict[str, Any] = {
        "NUM_HEADS": call.num_heads,
        "GROUP": call.num_heads // call.num_kv_heads,
        "KEY_SIZE": call.key.shape[2],
        "KEY_PADDED": padded,
        "VALUE_SIZE": call.value.shape[2],
        "VALUE_PADDED": max(least, power_of_two(call.value.shape[2])),
        "NORMALIZE": call.use_qk_l2norm_in_kernel,
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_V": rows,
        "BLOCK_T": _PADDED_ROWS,
        "CHUNK": _CHUNK,
    }
    kernel = gated_delta_chunks_kernel if in_chunks else gated_delta_kernel
    grid = (call.num_seqs, call.num_heads, ceil_div(call.value.shape[2], rows))
    launch = named_launch(
        kernel, grid, arguments, constexprs, writes=(*in_place, "out"), num_warps=8 if in_chunks else 4,
        num_stages=2 if in_chunks and limits.shared_memory >= _LARGE_SHARED_MEMORY else 1,
        hot=is_narrow,
    )  # fmt: skip
    launches = (launch,)
    if in_chunks:
        grid = (call.num_tokens // _CHUNK + call.num_seqs, call.num_heads)
        systems = named_launch(
            gated_delta_systems_kernel, grid, arguments, constexprs, writes=tuple(scratch), num_stages=1, num_warps=8
        )
        launches = (systems, launch)
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        scratch=tuple(scratch.items()), launches=launches,
    )  # fmt: skip


def _scratch(call: GatedDeltaCall[ArraySpec]) -> dict[str, ArraySpec]:
    chunks = (call.num_tokens // _CHUNK + call.num_seqs, call.num_heads, _CHUNK)
    return {
        "corrections": ArraySpec((*chunks, call.value.shape[2]), call.key.dtype),
        "responses": ArraySpec((*chunks, call.key.shape[2]), call.key.dtype),
        "products": ArraySpec((*chunks, _CHUNK), call.key.dtype),
        "decays": ArraySpec(chunks, "float32"),
    }


def _arguments(
    call: GatedDeltaCall[ArraySpec], arrays: dict[str, ArraySpec], out: ArraySpec, scratch: dict[str, ArraySpec]
) -> dict[str, Argument]:
    absent = ArraySpec((1, 1, 1, 1), "float32")
    optional = ("g", "gk", "cache_indices", "has_initial_state", "states")
    return {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *scratch, "out")},
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.states is None else call.states.shape[0], "i32", specialize=False),
        "scale": Scalar(call.scale, "fp32"),
        "epsilon": Scalar(L2NORM_EPSILON, "fp32"),
        **strides("query", ("token", "head"), call.query),
        **strides("key", ("token", "head"), call.key),
        **strides("value", ("token", "head"), call.value),
        **strides("beta", ("token",), call.beta),
        **strides("g", ("token",), arrays.get("g", absent)),
        **strides("gk", ("token", "head"), arrays.get("gk", absent)),
        **strides("states", ("slot", "head", "row"), arrays.get("states", absent)),
        **strides("out", ("token", "head"), out),
    }
