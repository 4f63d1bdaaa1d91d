"""The launch of one token's experts on Hopper; `sum_partials_kernel` adds up what it leaves."""

from __future__ import annotations

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.calls import ExpertsCall
from torch_core.experts.one_hopper import COLUMNS, FEW, STEPS, hopper_one_token_kernel
from torch_core.plan.operands import named_launch
from torch_core.plan.plan import Descriptor, LaunchPlan, Pointer
from torch_core.specs import ArraySpec

__all__ = ["hopper_one_token"]

_MATRIX = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def hopper_one_token(call: ExpertsCall[ArraySpec]) -> LaunchPlan:
    """Plans the launch; `partials` is float32[experts of the token times slices of 64 columns, hidden]."""
    experts, hidden, width = call.gate_up_kernel.shape
    inner = width // 2
    arguments = {
        "gate_up_kernel": Descriptor(
            "gate_up_kernel", (experts * hidden, width), (width, 1), (STEPS.value, COLUMNS.value), _MATRIX
        ),
        "down_kernel": Descriptor("down_kernel", (experts * inner, hidden), (hidden, 1), (FEW.value, hidden), _MATRIX),
        "x": Pointer("hidden_states"),
        **{name: Pointer(name) for name in ("topk_ids", "topk_weights", "partials")},
    }
    constants = {"HIDDEN": hidden, "INNER": inner, "STAGES": 6, "DOWN_STAGES": 3}
    grid = (inner // COLUMNS.value * call.num_pairs,)
    return named_launch(
        hopper_one_token_kernel, grid, arguments, constants, writes=("partials",), num_warps=8, num_stages=1, hot=True
    )
