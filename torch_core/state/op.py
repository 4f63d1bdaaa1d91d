"""The ops of layers that keep a state between tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call, dtype_name
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides
from torch_core.state.backward_call import GatedDeltaBackwardCall, MambaChunkScanBackwardCall
from torch_core.state.conv_call import CausalConvCall
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.mamba_call import MambaChunkScanCall

_SLOTS = ("query_start_loc", "cache_indices", "has_initial_state", "num_kept_tokens")
# Keys of more elements do not fit shared memory in float32.
_LARGEST_HEAD, _LARGEST_WIDE_HEAD = 256, 128


def _backward_limit(call: Any, implementation: str) -> str | None:
    if implementation != "triton":
        return None
    if call.num_kept_tokens is not None:
        return "num_kept_tokens has a derivative"
    dtypes = {dtype_name(x) for x in (call.query, call.key, call.value)}
    if len(dtypes) > 1:
        return f"the derivative of {', '.join(sorted(dtypes))}"
    largest = max(call.state_shape[1:])
    if largest > (_LARGEST_WIDE_HEAD if dtypes == {"float32"} else _LARGEST_HEAD):
        return f"heads have {largest} elements"
    return None


def _mamba_backward_limit(call: Any, implementation: str) -> str | None:
    if implementation != "triton":
        return None
    if call.num_kept_tokens is not None:
        return "num_kept_tokens has a derivative"
    if max(call.state_shape[1:]) > _LARGEST_HEAD:
        return f"states are {call.state_shape[1]} x {call.state_shape[2]}"
    dtypes = {dtype_name(x) for x in (call.x, call.B, call.C)}
    return None if len(dtypes) == 1 else f"the derivative of {', '.join(sorted(dtypes))}"


register(
    Op(
        call=CausalConvCall,
        reference="torch_core.state.reference:causal_conv1d",
        cpu="torch_core.state.cpu:causal_conv1d",
        plan="torch_core.state.kernels.conv.plan:plan_causal_conv",
        serves=(
            compute_dtype("x"),
            strides(contiguous=(*_SLOTS, "bias"), free=("weight",)),
            Served("short convolutions (causal_conv1d): widths 2 to 8, states, silu, prompts and decoded tokens", ALL),
        ),
    ),
    Op(
        call=GatedDeltaCall,
        reference="torch_core.state.reference:gated_delta_rule",
        cpu="torch_core.state.cpu:gated_delta_rule",
        plan="torch_core.state.kernels.delta.plan:plan_gated_delta",
        serves=(
            compute_dtype("query"),
            strides(contiguous=_SLOTS),
            Served("gated delta rule (gated_delta_rule): gates of heads or key channels (KDA), states, norms", ALL),
        ),
    ),
    Op(
        call=GatedDeltaBackwardCall,
        reference="torch_core.state.backward:gated_delta_backward",
        cpu="torch_core.state.backward:on_cpu",
        plan="torch_core.state.kernels.delta.backward_plan:plan_gated_delta_backward",
        serves=(
            compute_dtype("query"),
            strides(contiguous=(*_SLOTS, "d_last")),
            Served(
                "gated delta rule's derivative (gated_delta_backward)",
                {**ALL, "triton": "query, key and value of one dtype; heads up to 256, in float32 up to 128"},
                _backward_limit,
            ),
        ),
    ),
    Op(
        call=MambaChunkScanCall,
        reference="torch_core.state.reference:mamba_chunk_scan",
        cpu="torch_core.state.cpu:mamba_chunk_scan",
        plan="torch_core.state.kernels.mamba.plan:plan_mamba_chunk_scan",
        serves=(
            compute_dtype("x"),
            strides(contiguous=(*_SLOTS, "A", "D", "dt_bias")),
            Served("Mamba-2 (mamba_chunk_scan): groups, D, bias, softplus and limits of step sizes, states", ALL),
        ),
    ),
    Op(
        call=MambaChunkScanBackwardCall,
        reference="torch_core.state.backward:mamba_chunk_scan_backward",
        cpu="torch_core.state.backward:on_cpu",
        plan="torch_core.state.kernels.mamba.backward_plan:plan_mamba_backward",
        serves=(
            compute_dtype("x"),
            strides(contiguous=(*_SLOTS, "A", "D", "dt_bias", "d_last")),
            Served(
                "Mamba-2's derivative (mamba_chunk_scan_backward)",
                {**ALL, "triton": "x, B and C of one dtype; heads and states up to 256"},
                _mamba_backward_limit,
            ),
        ),
    ),
)


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of Qwen3-Next: a convolution of 8192 channels, 32 states of 128 x 128 for 16 heads of keys. Of
    Nemotron-H: 128 states of 64 x 128 in 8 groups; of Falcon-H1: 32 states of 128 x 256 in 2 groups.
    """
    kept = ArraySpec((64,), "int32")
    apart: dict[str, Any] = {"first_column": 0, "out_sizes": (2048, 2048, 4096)}
    return {
        "causal conv": _conv(8192, 8),
        "causal conv decode": _conv(64, 64),
        "causal conv verifying": _conv(256, 64, num_kept_tokens=kept),
        "causal conv apart": _conv(8192, 8, x=ArraySpec((8192, 12352), "bfloat16"), **apart),
        "causal conv decode apart": _conv(64, 64, x=ArraySpec((64, 12352), "bfloat16"), **apart),
        "causal conv without states": _conv(8192, 8, conv_states=None, cache_indices=None, has_initial_state=None),
        "gated delta decode": _delta(64, 64, g=ArraySpec((64, 32), "float32")),
        "gated delta": _delta(8, 8192, g=ArraySpec((8192, 32), "float32")),
        "gated delta in segments": _delta(1, 8192, g=ArraySpec((8192, 32), "float32")),
        "gated delta by channel": _delta(8, 8192, gk=ArraySpec((8192, 32, 128), "float32")),
        "gated delta backward": _backward(_delta(8, 8192, g=ArraySpec((8192, 32), "float32"))),
        "gated delta backward by channel": _backward(_delta(8, 8192, gk=ArraySpec((8192, 32, 128), "float32"))),
        "gated delta decode by channel": _delta(64, 64, gk=ArraySpec((64, 32, 128), "float32")),
        "gated delta verifying": _delta(64, 512, g=ArraySpec((512, 32), "float32"), num_kept_tokens=kept),
        "gated delta verifying by channel": _delta(
            64, 512, gk=ArraySpec((512, 32, 128), "float32"), num_kept_tokens=kept
        ),
        "gated delta of a few tokens": _delta(64, 256, g=ArraySpec((256, 32), "float32")),
        "gated delta of a few tokens by channel": _delta(64, 256, gk=ArraySpec((256, 32, 128), "float32")),
        "mamba decode": _mamba(64, 64),
        "mamba verifying": replace(_mamba(64, 256), num_kept_tokens=kept),
        "mamba": _mamba(8, 16384),
        "mamba in spans": _mamba(1, 8192),
        "mamba of wide states in spans": _mamba(1, 8192, num_heads=32, head_dim=128, groups=2, state_size=256),
        "mamba backward": _backward(_mamba(8, 16384)),
        "mamba backward in spans": _backward(_mamba(1, 8192, num_heads=32, groups=1)),
        "mamba backward of wide states": _backward(
            _mamba(8, 16384, num_heads=32, head_dim=128, groups=2, state_size=256)
        ),
        "mamba backward of large heads": _backward(_mamba(1, 8192, num_heads=32, head_dim=256, groups=2)),
    }


def _conv(num_tokens: int, num_seqs: int, **changes: Any) -> CausalConvCall[ArraySpec]:
    fields = {
        "x": ArraySpec((num_tokens, 8192), "bfloat16"),
        "weight": ArraySpec((8192, 4), "bfloat16"),
        "query_start_loc": ArraySpec((num_seqs + 1,), "int32"),
        "conv_states": ArraySpec((256, 3, 8192), "bfloat16"),
        "cache_indices": ArraySpec((num_seqs,), "int32"),
        "has_initial_state": ArraySpec((num_seqs,), "bool"),
        "activation": "silu",
    }
    return CausalConvCall(**{**fields, **changes})


def _delta(num_seqs: int, num_tokens: int, **changes: Any) -> GatedDeltaCall[ArraySpec]:
    heads = ArraySpec((num_tokens, 16, 128), "bfloat16")
    return GatedDeltaCall(
        query=heads,
        key=heads,
        value=ArraySpec((num_tokens, 32, 128), "bfloat16"),
        beta=ArraySpec((num_tokens, 32), "bfloat16"),
        states=ArraySpec((256, 32, 128, 128), "float32"),
        query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
        cache_indices=ArraySpec((num_seqs,), "int32"),
        has_initial_state=ArraySpec((num_seqs,), "bool"),
        max_query_len=num_tokens // num_seqs,
        scale=128**-0.5,
        use_qk_l2norm_in_kernel=True,
        **changes,
    )


def _backward(call: GatedDeltaCall[ArraySpec] | MambaChunkScanCall[ArraySpec]) -> Any:
    derivative = GatedDeltaBackwardCall if isinstance(call, GatedDeltaCall) else MambaChunkScanBackwardCall
    last = ArraySpec((call.num_seqs, *call.state_shape), "float32")
    return derivative.for_call(call, d_out=getattr(call, derivative.values_in), d_last=last)


def _mamba(
    num_seqs: int, num_tokens: int, num_heads: int = 128, head_dim: int = 64, groups: int = 8, state_size: int = 128
) -> MambaChunkScanCall[ArraySpec]:
    by_head = ArraySpec((num_heads,), "float32")
    weights = ArraySpec((num_tokens, groups, state_size), "bfloat16")
    return MambaChunkScanCall(
        x=ArraySpec((num_tokens, num_heads, head_dim), "bfloat16"),
        dt=ArraySpec((num_tokens, num_heads), "bfloat16"),
        A=by_head,
        B=weights,
        C=weights,
        D=by_head,
        dt_bias=by_head,
        states=ArraySpec((256, num_heads, head_dim, state_size), "float32"),
        query_start_loc=ArraySpec((num_seqs + 1,), "int32"),
        cache_indices=ArraySpec((num_seqs,), "int32"),
        has_initial_state=ArraySpec((num_seqs,), "bool"),
        max_query_len=num_tokens // num_seqs,
        dt_softplus=True,
    )
