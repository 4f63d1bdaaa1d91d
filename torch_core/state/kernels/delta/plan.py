"""The plan of the gated delta rule, token by token: from shapes, dtypes and options alone."""

from __future__ import annotations

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.kernels.delta.kernel import gated_delta_kernel

# A program's part of a state, in registers.
_STATE_ELEMENTS = 4096
_PADDED_ROWS = 16


def plan_gated_delta(call: GatedDeltaCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    key_size, value_size = call.key.shape[2], call.value.shape[2]
    padded = power_of_two(key_size)
    rows = min(power_of_two(value_size), max(1, _STATE_ELEMENTS // padded))
    absent = ArraySpec((1, 1, 1, 1), "float32")
    optional = ("g", "gk", "cache_indices", "has_initial_state", "states")
    arguments: dict[str, Argument] = {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, "out")},
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
        **strides("out", ("token", "head"), results["out"]),
    }
    constexprs = {
        "GROUP": call.num_heads // call.num_kv_heads,
        "KEY_SIZE": key_size,
        "KEY_PADDED": padded,
        "VALUE_SIZE": value_size,
        "NORMALIZE": call.use_qk_l2norm_in_kernel,
        "BLOCK_V": rows,
        "BLOCK_T": _PADDED_ROWS,
    }
    in_place = tuple(name for name in call.written if name != "out")
    launch = named_launch(
        gated_delta_kernel, (call.num_seqs, call.num_heads, ceil_div(value_size, rows)), arguments, constexprs,
        writes=(*in_place, "out"), num_stages=1, hot=True,
    )  # fmt: skip
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        launches=(launch,),
    )  # fmt: skip
