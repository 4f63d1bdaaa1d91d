"""Seeded problems of a layer of experts and of its router."""

from __future__ import annotations

from typing import Any

import torch

from torch_core import reference
from torch_core.experts.call import ExpertsCall
from torch_core.experts.reference import activated
from torch_core.experts.routing_call import RouteCall

__all__ = [
    "assert_as_exact_as_torch",
    "assert_results_as_exact_as_torchs",
    "assert_routed_as_exactly_as_torch",
    "experts_call",
    "route_call",
]


def experts_call(
    seed: int, num_tokens: int, *, num_experts: int = 8, top_k: int = 2, hidden: int = 48, inner: int = 40,
    dtype: str = "float32", activation: str = "silu", bias: bool = False, unused: float = 0.0, gated: bool = True,
    adapted: bool = False, **options: Any,
) -> ExpertsCall[torch.Tensor]:  # fmt: skip
    """Draws a call; `unused` is the share of ids that are no expert's, on both sides of those that are.

    With `adapted` something is added to the first products, and the inputs of the second ones are wanted.
    """
    torch.manual_seed(seed)
    kind, first = getattr(torch, dtype), inner * (1 + gated)
    topk_ids = torch.rand(num_tokens, num_experts).topk(top_k).indices.int()
    nobody = torch.where(torch.rand(topk_ids.shape) < 0.5, -1, num_experts).int()
    biases = {
        "gate_up_bias": torch.randn(num_experts, first, dtype=kind),
        "down_bias": torch.randn(num_experts, hidden, dtype=kind),
    }
    if adapted:
        options |= {"gate_up_added": torch.randn(num_tokens, top_k, first).to(kind), "with_activated": True}
    return ExpertsCall(
        hidden_states=torch.randn(num_tokens, hidden, dtype=kind),
        topk_weights=torch.rand(num_tokens, top_k),
        topk_ids=torch.where(torch.rand(topk_ids.shape) < unused, nobody, topk_ids),
        gate_up_kernel=(torch.randn(num_experts, hidden, first) / hidden**0.5).to(kind),
        down_kernel=(torch.randn(num_experts, inner, hidden) / inner**0.5).to(kind),
        activation=activation,
        **(biases if bias else {}),
        **options,
    )


def assert_as_exact_as_torch(call: ExpertsCall[torch.Tensor], out: torch.Tensor) -> None:
    """The error is at most twice that of the reference in the call's own type, and some roundings of the largest."""
    exact = reference.fused_experts(call)
    kind = call.hidden_states.dtype
    allowed = (reference.fused_experts(call, compute_dtype=kind).double() - exact).abs().max()
    allowed = 2 * (allowed + torch.finfo(kind).eps * exact.abs().max())
    assert (out.double() - exact).abs().max() <= allowed


def assert_results_as_exact_as_torchs(call: ExpertsCall[torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """The same of both results; inputs of second products exist where ids are experts."""
    assert_as_exact_as_torch(call, found["out"])
    kind, is_expert = call.hidden_states.dtype, (call.topk_ids >= 0) & (call.topk_ids < call.num_experts)
    exact, narrow = (activated(call, compute_dtype=dtype)[is_expert].double() for dtype in (torch.float64, kind))
    allowed = 2 * ((narrow - exact).abs().max() + torch.finfo(kind).eps * exact.abs().max())
    assert found["activated"].dtype == kind
    assert (found["activated"][is_expert].double() - exact).abs().max() <= allowed


def route_call(
    seed: int, num_tokens: int, *, num_experts: int = 12, top_k: int = 3, hidden: int = 48, dtype: str = "float32",
    bias: bool = False, corrected: bool = False, **options: Any,
) -> RouteCall[torch.Tensor]:  # fmt: skip
    """Draws a router's call."""
    torch.manual_seed(seed)
    kind = getattr(torch, dtype)
    return RouteCall(
        hidden_states=torch.randn(num_tokens, hidden, dtype=kind),
        kernel=(2 * torch.randn(hidden, num_experts) / hidden**0.5).to(kind),
        bias=torch.randn(num_experts, dtype=kind) if bias else None,
        correction_bias=torch.randn(num_experts) / 4 if corrected else None,
        top_k=top_k,
        **options,
    )


def assert_routed_as_exactly_as_torch(call: RouteCall[torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """The weights are within the error rule of float32, and so are the scores of other experts than the exact ones."""
    weights, experts = reference.route_experts(call)
    narrow, _ = reference.route_experts(call, compute_dtype=torch.float32)
    eps = torch.finfo(torch.float32).eps
    # Logits are sums of as many products as a row has elements, in an order of the kernel's own.
    allowed = 2 * ((narrow.double() - weights).abs().max() + eps * call.hidden_states.shape[1] ** 0.5 * weights.max())
    assert (found["topk_weights"].double() - weights).abs().max() <= allowed
    assert found["topk_ids"].dtype == torch.int32
    assert torch.equal(found["topk_ids"].long(), experts)
