"""The plan of a layer of experts for one token: each weight of the token's experts is read once, in one launch."""

from __future__ import annotations

from torch_core.base.specs import DTYPE_BYTES, ArraySpec
from torch_core.experts.call import ExpertsCall
from torch_core.experts.kernels.one_token.kernel import one_token_kernel, sum_partials_kernel
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar

_NUM_WARPS, _STAGES = 4, 4
# Elements of a tile of gate (up has as many), and of one of the second kernel.
_TILE, _DOWN_TILE = 32 * 128, 4 * 2048
_COLUMNS = (32, 128)
_SUMMED_COLUMNS = 16


def serves_one_token(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> bool:
    """Returns whether a call has one token, and its rows of the second kernel fit a block of this device."""
    row = max(_DOWN_TILE, power_of_two(call.hidden_states.shape[1])) * DTYPE_BYTES[call.down_kernel.dtype]
    return call.hidden_states.shape[0] == 1 and (_STAGES - 1) * row <= limits.shared_memory


def plan_one_token(call: ExpertsCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call of one token. Outputs: out."""
    hidden, inner = call.hidden_states.shape[1], call.down_kernel.shape[1]
    fewest, most = _COLUMNS
    # As many programs as run at once, if that can be: a second turn of a few would take as long as the first.
    columns = min(most, max(fewest, power_of_two(ceil_div(inner * call.num_pairs, 2 * limits.num_sms))))
    slices = ceil_div(inner, columns)
    parts = slices * call.num_pairs
    read, given = ("gate_up_kernel", "down_kernel", "topk_ids", "topk_weights"), call.arrays()
    arguments: dict[str, Argument] = {
        "x": Pointer("hidden_states"),
        **{name: Pointer(name) for name in read},
        **{name: Pointer(name) if name in given else ABSENT for name in ("gate_up_bias", "down_bias")},
        "added": Pointer("gate_up_added") if "gate_up_added" in given else ABSENT,
        "activated": Pointer("activated") if call.with_activated else ABSENT,
        "partials": Pointer("partials"),
        "out": Pointer("out"),
        "gate_up_expert_stride": Scalar(call.gate_up_kernel.element_strides[0], "i64"),
        "gate_up_row_stride": Scalar(call.gate_up_kernel.element_strides[1], "i64"),
        "down_expert_stride": Scalar(call.down_kernel.element_strides[0], "i64"),
        "down_row_stride": Scalar(call.down_kernel.element_strides[1], "i64"),
    }
    constants = {
        "NUM_EXPERTS": call.num_experts,
        "HIDDEN": hidden,
        "INNER": inner,
        "ACTIVATION": call.activation,
        "GATED": call.is_gated,
        "BLOCK_N": columns,
        "BLOCK_K": _TILE // columns,
        "BLOCK_R": max(1, min(columns, _DOWN_TILE // power_of_two(hidden))),
        "BLOCK_H": power_of_two(hidden),
        "STAGES": _STAGES,
    }
    sums = {"PARTS": parts, "SIZE": hidden, "BLOCK_P": power_of_two(parts), "BLOCK_N": _SUMMED_COLUMNS}
    launches = (
        named_launch(
            one_token_kernel, (slices, call.num_pairs), arguments, constants,
            writes=("activated", "partials") if call.with_activated else ("partials",), num_warps=_NUM_WARPS, hot=True,
        ),
        named_launch(
            sum_partials_kernel, (ceil_div(hidden, _SUMMED_COLUMNS),), arguments, sums, writes=("out",), num_stages=1
        ),
    )  # fmt: skip
    scratch = {"partials": ArraySpec((parts, hidden), "float32")}
    return OperationPlan.of(call.name, call.arrays(), launches, call.outputs(), scratch)
