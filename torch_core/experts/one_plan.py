"""The plan of a layer of experts for one token: two launches that read what the token's experts have, once."""

from __future__ import annotations

from typing import Any

from torch_core.calls import ExpertsCall
from torch_core.experts.one import one_token_down_kernel, one_token_gate_kernel
from torch_core.plan.operands import ceil_div, named_launch, power_of_two
from torch_core.plan.plan import ABSENT, Argument, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.specs import ArraySpec

__all__ = ["plan_one_token"]

# Columns, elements of a row that one step multiplies, warps, stages.
_GATE = (32, 128, 4, 4)
_DOWN = (16, 64, 8, 4)


def plan_one_token(call: ExpertsCall[ArraySpec]) -> OperationPlan:
    """Plans a checked call of one token. Outputs: out."""
    scratch = {"gated": ArraySpec((call.num_pairs, call.down_kernel.shape[1]), "float32")}
    return OperationPlan.of(call.name, call.arrays(), (_gate(call), _down(call)), call.outputs(), scratch)


def _gate(call: ExpertsCall[ArraySpec]) -> LaunchPlan:
    columns, steps, num_warps, num_stages = _GATE
    inner = call.down_kernel.shape[1]
    arguments = {
        "x": Pointer("hidden_states"),
        "kernel": Pointer("gate_up_kernel"),
        "bias": ABSENT if call.gate_up_bias is None else Pointer("gate_up_bias"),
        "topk_ids": Pointer("topk_ids"),
        "out": Pointer("gated"),
        **_strides(call.gate_up_kernel),
    }
    constants: dict[str, Any] = {
        "NUM_EXPERTS": call.num_experts,
        "IN": call.hidden_states.shape[1],
        "OUT": inner,
        "ACTIVATION": call.activation,
        "BLOCK_N": columns,
        "BLOCK_K": steps,
        "STAGES": num_stages,
    }
    grid = (ceil_div(inner, columns), call.num_pairs)
    return named_launch(
        one_token_gate_kernel, grid, arguments, constants, writes=("gated",), num_warps=num_warps, hot=True
    )


def _down(call: ExpertsCall[ArraySpec]) -> LaunchPlan:
    columns, steps, num_warps, num_stages = _DOWN
    top, hidden = power_of_two(call.num_pairs), call.down_kernel.shape[2]
    arguments = {
        "x": Pointer("gated"),
        "kernel": Pointer("down_kernel"),
        "bias": ABSENT if call.down_bias is None else Pointer("down_bias"),
        "topk_ids": Pointer("topk_ids"),
        "topk_weights": Pointer("topk_weights"),
        "out": Pointer("out"),
        **_strides(call.down_kernel),
    }
    constants = {
        "NUM_EXPERTS": call.num_experts,
        "TOP_K": call.num_pairs,
        "IN": call.down_kernel.shape[1],
        "OUT": hidden,
        "BLOCK_TOP": top,
        "BLOCK_N": columns,
        "BLOCK_K": max(1, steps * 8 // max(8, top)),
        "STAGES": num_stages,
    }
    grid = (ceil_div(hidden, columns),)
    return named_launch(
        one_token_down_kernel, grid, arguments, constants, writes=("out",), num_warps=num_warps, hot=True
    )


def _strides(kernel: ArraySpec) -> dict[str, Argument]:
    expert, row, _ = kernel.element_strides
    return {"kernel_expert_stride": Scalar(expert, "i64"), "kernel_row_stride": Scalar(row, "i64")}
