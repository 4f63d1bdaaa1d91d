"""The specification of expert layers and routers in plain torch: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall


def fused_experts(call: ExpertsCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, hidden_size]`: the weighted sum of the outputs of each token's experts.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> fused_experts(ExpertsCall(hidden_states=one[0], topk_weights=2 * one[0], topk_ids=torch.tensor([[0]]),
        ...     gate_up_kernel=torch.ones(1, 1, 2), down_kernel=3 * one, activation="relu")).item()
        6.0
    """
    out = torch.zeros(call.hidden_states.shape, dtype=compute_dtype)
    inputs = activated(call, compute_dtype=compute_dtype)
    for token, (weights, experts) in enumerate(zip(call.topk_weights.tolist(), call.topk_ids.tolist(), strict=True)):
        for k, (weight, expert) in enumerate(zip(weights, experts, strict=True)):
            if 0 <= expert < call.num_experts:
                inner = inputs[token, k]
                out[token] += weight * _linear(inner, call.down_kernel, call.down_bias, expert, compute_dtype)
    return out


def activated(call: ExpertsCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, top_k, intermediate_size]`: the inputs of the second kernels, 0 without an expert."""
    inputs = torch.zeros(*call.topk_ids.shape, call.down_kernel.shape[1], dtype=compute_dtype)
    for token, experts in enumerate(call.topk_ids.tolist()):
        for k, expert in enumerate(experts):
            if 0 <= expert < call.num_experts:
                row = call.hidden_states[token]
                inner = _linear(row, call.gate_up_kernel, call.gate_up_bias, expert, compute_dtype)
                if call.gate_up_added is not None:
                    inner = inner + call.gate_up_added[token, k].to(compute_dtype)
                gate, up = inner.chunk(2) if call.is_gated else (inner, torch.ones_like(inner))
                inputs[token, k] = _activated(call.activation, gate, up)
    return inputs


def _linear(x: Tensor, kernel: Tensor, bias: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    out = x.to(dtype) @ kernel[expert].to(dtype)
    return out if bias is None else out + bias[expert].to(dtype)


def _activated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
    if activation in ("gelu_new", "gelu_pytorch_tanh"):
        return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if activation == "swigluoai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    return gate.clamp(min=0) ** (2 if activation == "relu2" else 1) * up


def route_experts(call: RouteCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns weights `[num_tokens, top_k]` and experts int64 `[num_tokens, top_k]`, the best first.

    Example:
        >>> call = RouteCall(hidden_states=torch.ones(1, 1), kernel=torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)
        >>> route_experts(call)[1].tolist()
        [[1, 2]]
    """
    weights = torch.zeros(call.num_tokens, call.top_k, dtype=compute_dtype)
    experts = torch.zeros(call.num_tokens, call.top_k, dtype=torch.int64)
    for token, row in enumerate(call.hidden_states):
        scores = router_scores(call, row, compute_dtype)
        choice = scores if call.correction_bias is None else scores + call.correction_bias.to(compute_dtype)
        # A stable order: of equal scores the first expert's comes first.
        order = choice.argsort(descending=True, stable=True).tolist()
        allowed = _of_best_groups(call, choice.tolist())
        best = [expert for expert in order if expert in allowed][: call.top_k]
        found = scores[best]
        if call.norm_topk_prob:
            found = found / (found.sum() + 1e-20)
        weights[token], experts[token] = found * call.routed_scaling_factor, torch.tensor(best)
    return weights, experts


def router_scores(call: RouteCall[Tensor], row: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Returns the scores of all experts for a row of `hidden_states`."""
    logits = row.to(compute_dtype) @ call.kernel.to(compute_dtype)
    if call.bias is not None:
        logits = logits + call.bias.to(compute_dtype)
    return logits.softmax(-1) if call.scoring_func == "softmax" else 1 / (1 + (-logits).exp())


def _of_best_groups(call: RouteCall[Tensor], choice: list[float]) -> list[int]:
    size = call.num_experts // call.n_group
    groups = [sorted(choice[first : first + size]) for first in range(0, call.num_experts, size)]
    values = [sum(group[-2 if call.sums_two else -1 :]) for group in groups]
    kept = sorted(range(call.n_group), key=lambda group: (-values[group], group))[: call.topk_group]
    return [expert for expert in range(call.num_experts) if expert // size in kept]
