"""The ops of a layer of experts: its router, and the experts themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall
from torch_core.launch.call import Call
from torch_core.launch.op import Op, Served, register
from torch_core.launch.serves import ALL, compute_dtype, strides

register(
    Op(
        call=ExpertsCall,
        reference="torch_core.experts.reference:fused_experts",
        cpu="torch_core.experts.cpu:fused_experts",
        plan="torch_core.experts.plan:plan_experts",
        serves=(
            compute_dtype("hidden_states"),
            strides(contiguous=("topk_weights", "topk_ids", "gate_up_bias", "down_bias", "gate_up_added")),
            Served("layers of experts (fused_experts): gated or not, activations, biases, ids of other devices", ALL),
        ),
    ),
    Op(
        call=RouteCall,
        reference="torch_core.experts.reference:route_experts",
        cpu="torch_core.experts.cpu:route_experts",
        plan="torch_core.experts.kernels.route.plan:plan_route",
        serves=(
            compute_dtype("hidden_states"),
            strides(contiguous=("bias", "correction_bias")),
            Served("routers (route_experts): softmax and sigmoid, groups of experts, a correction bias", ALL),
        ),
    ),
)


def calls_in_use() -> dict[str, Call[ArraySpec]]:
    """Returns calls of specs by label, which names the op and the differences from its most frequent use.

    Representative calls of Qwen3-30B-A3B's experts: 8 of 128 with 768 columns.
    """
    return {
        "experts": _experts(32),
        "experts few": _experts(1),
        "experts some": _experts(1024),
        "experts many": _experts(4096),
        "experts float32": _experts(4096, dtype="float32"),
        "experts few without a gate": _experts(1, columns=768, activation="relu2"),
        "experts many without a gate": _experts(4096, columns=768, activation="relu2"),
        **{
            f"experts {label}with adapters": replace(
                _experts(num_tokens, with_activated=True), gate_up_added=ArraySpec((num_tokens, 8, 1536), "bfloat16")
            )
            for label, num_tokens in (("", 32), ("few ", 1), ("some ", 1024), ("many ", 4096))
        },
        "route": _route(4096),
        "route one": _route(1),
        "route some in groups": replace(_route(16), scoring_func="sigmoid", n_group=8, topk_group=4),
    }


def _experts(
    num_tokens: int, *, dtype: str = "bfloat16", columns: int = 1536, **options: Any
) -> ExpertsCall[ArraySpec]:
    """Qwen3-30B-A3B's: 8 of 128 experts of 768 columns."""
    return ExpertsCall(
        hidden_states=ArraySpec((num_tokens, 2048), dtype),
        topk_weights=ArraySpec((num_tokens, 8), "float32"),
        topk_ids=ArraySpec((num_tokens, 8), "int32"),
        gate_up_kernel=ArraySpec((128, 2048, columns), dtype),
        down_kernel=ArraySpec((128, 768, 2048), dtype),
        **options,
    )


def _route(num_tokens: int) -> RouteCall[ArraySpec]:
    return RouteCall(
        hidden_states=ArraySpec((num_tokens, 2048), "bfloat16"), kernel=ArraySpec((2048, 128), "bfloat16"), top_k=8
    )
