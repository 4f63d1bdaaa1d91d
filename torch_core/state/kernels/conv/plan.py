"""The plan of the short causal convolution: from shapes, dtypes and options alone."""

from __future__ import annotations

import itertools
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.state.conv_call import OUTS, CausalConvCall
from torch_core.state.kernels.conv.kernel import causal_conv_kernel, causal_conv_step_kernel

# Batches with at most this many tokens for each sequence take small tiles: most of their sequences are decoded.
_FEW_TOKENS = 8
_FEW_ROWS, _MANY_ROWS = 4, 16
_COLUMNS = 256
# What the compiler knows of a stride that is not a constant is whether it is a multiple.
_ALIGNED = 16


def plan_causal_conv(call: CausalConvCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    num_tokens, num_channels = call.num_tokens, call.num_channels
    few = max(_FEW_ROWS, power_of_two(call.width - 1))
    rows = few if num_tokens <= _FEW_TOKENS * call.num_seqs else _MANY_ROWS
    columns = min(_COLUMNS, power_of_two(num_channels))
    optional = ("bias", "cache_indices", "has_initial_state", "num_kept_tokens", "conv_states", *OUTS[1:])
    ends = list(itertools.accumulate(call.out_sizes or ()))
    arguments: dict[str, Argument] = {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *results)},
        "num_tokens": Scalar(num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.conv_states is None else call.conv_states.shape[0], "i32", specialize=False),
        **strides("x", ("token",), call.x),
        **strides("weight", ("channel", "tap"), call.weight),
        **strides("state", ("slot", "token"), arrays.get("conv_states", ArraySpec((1, 1, 1), "float32"))),
        **strides("out", ("token",), results["out"]),
    }
    constexprs = {
        "CHANNELS": num_channels,
        "FIRST_COLUMN": call.first_column or 0,
        "START_1": ends[0] if ends else num_channels,
        "START_2": ends[1] if len(ends) > 2 else num_channels,
        "WIDTH": call.width,
        "SILU": call.activation == "silu",
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_T": rows,
        "BLOCK_C": columns,
        "BLOCK_STATE": power_of_two(call.width - 1),
    }
    if call.first_column is not None and call.x.element_strides[0] % _ALIGNED:
        # Known to the compiler, it may still allow loads of several elements.
        constexprs["x_token_stride"] = call.x.element_strides[0]
    # As many tokens as sequences are decoded ones, but for a few batches.
    kernel: Any = causal_conv_step_kernel if num_tokens <= call.num_seqs else causal_conv_kernel
    # Every sequence has at most one tile that is not full, and so has the padding.
    programs = call.num_seqs if kernel is causal_conv_step_kernel else num_tokens // rows + call.num_seqs + 1
    grid, in_place = (programs, ceil_div(num_channels, columns)), tuple(name for name in call.written if name != "out")
    launch = named_launch(kernel, grid, arguments, constexprs, writes=(*in_place, *results), num_stages=1, hot=True)
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=tuple(results.items()), in_place=in_place,
        launches=(launch,),
    )  # fmt: skip
