"""The plan of a log-sum-exp of rows: from the number of features alone."""

from __future__ import annotations

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.rowwise.call import RowLogSumExpCall
from torch_core.rowwise.kernels.logsumexp.kernel import row_logsumexp_kernel

_MOST_LANES = 4096


def plan_row_logsumexp(call: RowLogSumExpCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Output: out."""
    num_rows, features = call.x.shape
    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "out": Pointer("out"),
        "x_row_stride": Scalar(call.x.element_strides[0], "i64"),
    }
    constexprs = {"FEATURES": features, "BLOCK": min(_MOST_LANES, power_of_two(features))}
    launch = named_launch(
        row_logsumexp_kernel, (num_rows,), arguments, constexprs, writes=("out",), num_warps=8, num_stages=3
    )
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())
