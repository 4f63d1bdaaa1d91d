"""The ops of layers that keep a state between tokens."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides
from torch_core.state.conv_call import CausalConvCall

register(
    Op(
        call=CausalConvCall,
        reference="torch_core.state.reference:causal_conv1d",
        cpu="torch_core.state.cpu:causal_conv1d",
        plan="torch_core.state.kernels.conv.plan:plan_causal_conv",
        serves=(
            compute_dtype("x"),
            strides(contiguous=("query_start_loc", "cache_indices", "has_initial_state", "bias"), free=("weight",)),
            Served("short convolutions (causal_conv1d): widths 2 to 4, states, silu, prompts and decoded tokens", ALL),
        ),
    ),
)


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of Qwen3-Next's convolution: 8192 channels, width 4.
    """
    return {
        "causal conv": _conv(8192, 8),
        "causal conv decode": _conv(64, 64),
        "causal conv without states": _conv(8192, 8, conv_states=None, cache_indices=None, has_initial_state=None),
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
