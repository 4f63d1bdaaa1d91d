"""The plan of rows as e4m3 numbers: from the number of features alone."""

from __future__ import annotations

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import named_launch, power_of_two
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.rowwise.call import RowQuantizeCall
from torch_core.rowwise.kernels.quantize.kernel import row_quantize_kernel

# Columns that are read together, fewer of a gated row, which has two halves; and threads of a program.
_CHUNK, _GATED_CHUNK, _THREADS = 2048, 1024, 256


def plan_row_quantize(call: RowQuantizeCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: values, scale, and stream with a residual."""
    whole, outputs = _CHUNK if call.activation is None else _GATED_CHUNK, call.outputs()
    chunk = min(whole, power_of_two(call.features))
    names = ("x", "row_scale", "column_scale", "residual", "weight", "values", "scale", "stream")
    given = {**call.arrays(), **outputs}
    arguments: dict[str, Argument] = {
        **{name: Pointer(name) if name in given else ABSENT for name in names},
        "x_row_stride": Scalar(call.x.element_strides[0], "i64"),
        "residual_row_stride": Scalar(0 if call.residual is None else call.residual.element_strides[0], "i64"),
        "epsilon": Scalar(call.epsilon, "fp32"),
    }
    constexprs = {
        "FEATURES": call.features,
        "CHUNK": chunk,
        "ACTIVATION": call.activation,
        "ROUND_FIRST": call.norm_type == "rms_norm",
        "ADD_ONE": call.norm_type == "gemma_rms_norm",
    }
    launch = named_launch(
        row_quantize_kernel, (call.num_rows,), arguments, constexprs, writes=tuple(outputs),
        num_warps=max(1, _THREADS // 32 * chunk // whole), num_stages=1, hot=True,
    )  # fmt: skip
    return OperationPlan.of(call.name, call.arrays(), (launch,), outputs)
