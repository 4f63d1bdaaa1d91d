"""The plan of a router: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.experts.kernels.route.kernel import router_logits_kernel, select_experts_kernel
from torch_core.experts.routing_call import RouteCall
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar

_MOST_PARTS = 64
_LEAST_PART = 64
_MOST_EXPERTS = 128


def plan_route(call: RouteCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty. Outputs: topk_weights, topk_ids."""
    num_tokens, hidden = call.hidden_states.shape
    block_t = 1 if num_tokens == 1 else 16 if num_tokens <= 512 else 64
    block_e = max(16, min(_MOST_EXPERTS, power_of_two(call.num_experts)))
    tiles = ceil_div(num_tokens, block_t) * ceil_div(call.num_experts, block_e)
    # Parts until every multiprocessor has a program or two: one token's kernel is read by as many as that pays for.
    wanted = max(1, min(_MOST_PARTS, 2 * limits.num_sms // tiles))
    part = max(_LEAST_PART, power_of_two(ceil_div(hidden, wanted)))
    num_parts = ceil_div(hidden, part)
    launches = (_logits(call, block_t, block_e, part, num_parts), _selection(call, num_parts))
    scratch = {"parts": ArraySpec((num_parts, num_tokens, call.num_experts), "float32")}
    return OperationPlan.of(call.name, call.arrays(), launches, call.outputs(), scratch)


def _logits(call: RouteCall[ArraySpec], block_t: int, block_e: int, part: int, num_parts: int) -> LaunchPlan:
    num_tokens, hidden = call.hidden_states.shape
    arguments: dict[str, Argument] = {
        "x": Pointer("hidden_states"),
        "kernel": Pointer("kernel"),
        "parts": Pointer("parts"),
        "num_tokens": Scalar(num_tokens, "i32", specialize=False),
        "x_stride": Scalar(call.hidden_states.element_strides[0], "i64"),
        "kernel_row_stride": Scalar(call.kernel.element_strides[0], "i64"),
    }
    constants = {
        "IN": hidden,
        "NUM_EXPERTS": call.num_experts,
        "PART": part,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_K": min(part, 64 if call.num_tokens > 1 else 128),
    }
    grid = (ceil_div(num_tokens, block_t), ceil_div(call.num_experts, block_e), num_parts)
    return named_launch(router_logits_kernel, grid, arguments, constants, writes=("parts",), num_warps=4, num_stages=3)


def _selection(call: RouteCall[ArraySpec], num_parts: int) -> LaunchPlan:
    arguments: dict[str, Argument] = {
        "parts": Pointer("parts"),
        "bias": ABSENT if call.bias is None else Pointer("bias"),
        "correction_bias": ABSENT if call.correction_bias is None else Pointer("correction_bias"),
        "topk_weights": Pointer("topk_weights"),
        "topk_ids": Pointer("topk_ids"),
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "scaling": Scalar(call.routed_scaling_factor, "fp32"),
    }
    constants: dict[str, Any] = {
        "NUM_EXPERTS": call.num_experts,
        "PARTS": num_parts,
        "TOP_K": call.top_k,
        "SOFTMAX": call.scoring_func == "softmax",
        "NORM": call.norm_topk_prob,
        "GROUPS": call.n_group,
        "TOPK_GROUP": call.topk_group,
        # A warp for a token: nothing that is compared crosses warps.
        "BLOCK_T": 1 if call.num_tokens <= 512 else 4,
        "BLOCK_G": power_of_two(call.n_group),
        "BLOCK_S": power_of_two(call.num_experts // call.n_group),
        "BLOCK_TOP": power_of_two(call.top_k),
    }
    grid = (ceil_div(call.num_tokens, constants["BLOCK_T"]),)
    return named_launch(
        select_experts_kernel, grid, arguments, constants, writes=("topk_weights", "topk_ids"),
        num_warps=constants["BLOCK_T"], num_stages=1,
    )  # fmt: skip
