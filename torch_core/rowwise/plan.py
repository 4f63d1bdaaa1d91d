"""Which kernel a product of rows is for."""

from __future__ import annotations

from torch_core.base.errors import Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.rowwise.call import RowProductCall
from torch_core.rowwise.kernels.gated_product_hopper.plan import hopper_gated_product, is_hopper
from torch_core.rowwise.kernels.product.plan import plan_row_product


def plan_product(call: RowProductCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Output: out."""
    if is_hopper(call, limits):
        return hopper_gated_product(call, limits)
    if call.activation is not None:
        raise Unsupported(
            "activation", "is part of 16-bit products on Hopper alone", "multiply and activate in two steps"
        )
    return plan_row_product(call, limits)
