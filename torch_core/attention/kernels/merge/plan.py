"""The plan of the merge of two partial attention results."""

from __future__ import annotations

from torch_core.attention.kernels.merge.kernel import merge_states_kernel
from torch_core.attention.merge_call import MergeCall
from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, scale_pointer, scale_value, strides
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar

_ARRAYS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")


def plan_merge(call: MergeCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked merge that is not empty. Outputs: out and lse, written where they are given."""
    arrays = call.arrays()
    results = {**call.outputs(), **{name: arrays.pop(name) for name in call.written}}
    specs = {**arrays, **results}
    num_tokens, num_heads, head_size = call.out_a.shape
    padded = power_of_two(head_size)
    rows = max(1, min(16, 2048 // padded))
    limit = num_tokens if call.num_tokens_a is None else call.num_tokens_a
    known: dict[str, Argument] = {
        **{name: Pointer(name) for name in _ARRAYS},
        "out_scale": scale_pointer("out_scale", call.out_scale),
        "out_scale_value": scale_value(call.out_scale),
        "num_rows": Scalar(num_tokens * num_heads, "i64", specialize=False),
        "num_tokens_a": Scalar(limit, "i32", specialize=False),
    }
    for name in _ARRAYS:
        known |= strides(name, ("token", "head"), specs[name])
    constants = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": padded,
        "ROWS": rows,
        "HAS_SCALE": call.out_scale is not None,
    }
    grid = (max(1, ceil_div(num_tokens * num_heads, rows)),)
    launch = named_launch(merge_states_kernel, grid, known, constants, writes=("out", "lse"), num_stages=1, hot=True)
    outputs = tuple((name, results[name]) for name in ("out", "lse"))
    return OperationPlan(name=call.name, inputs=tuple(arrays.items()), outputs=outputs, launches=(launch,))
