"""A layer of experts: each token's experts one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.experts.call import ExpertsCall


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
