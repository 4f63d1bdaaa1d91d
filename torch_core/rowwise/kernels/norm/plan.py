"""The plan of a norm of rows: from the number of features alone."""

from __future__ import annotations

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import named_launch, power_of_two
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.rowwise.call import RowNormCall
from torch_core.rowwise.kernels.norm.kernel import row_norm_kernel


def plan_row_norm(call: RowNormCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Output: out."""
    num_rows, features = call.x.shape
    block = power_of_two(features)
    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "weight": Pointer("weight"),
        "bias": ABSENT if call.bias is None else Pointer("bias"),
        "out": Pointer("out"),
        "x_row_stride": Scalar(call.x.element_strides[0], "i64"),
        "num_weights": Scalar(call.weight.shape[0], "i32", specialize=False),
        "epsilon": Scalar(call.epsilon, "fp32"),
    }
    constexprs = {
        "FEATURES": features,
        "BLOCK": block,
        "CENTER": call.norm_type == "layer_norm",
        "ROUND_FIRST": call.norm_type == "rms_norm",
        "ADD_ONE": call.norm_type == "gemma_rms_norm",
    }
    launch = named_launch(
        row_norm_kernel, (num_rows,), arguments, constexprs, writes=("out",),
        num_warps=max(1, min(16, block // 512)), num_stages=1,
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), (launch,), call.outputs())
