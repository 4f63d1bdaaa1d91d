"""A layer of experts and its router on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.experts.call import ExpertsCall
from torch_core.experts.routing_call import RouteCall


def fused_experts(call: ExpertsCall[Tensor]) -> dict[str, Tensor]:
    """Runs each expert on the rows that go to it; sums in float32. Nothing is checked."""
    x = call.hidden_states
    out = torch.zeros(x.shape, dtype=torch.float32)
    activated = x.new_zeros(*call.topk_ids.shape, call.down_kernel.shape[1]) if call.with_activated else None
    for expert in range(call.num_experts):
        tokens, places = (call.topk_ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        inner = x[tokens] @ call.gate_up_kernel[expert]
        if call.gate_up_bias is not None:
            inner = inner + call.gate_up_bias[expert]
        if call.gate_up_added is not None:
            inner = inner + call.gate_up_added[tokens, places]
        gate, up = inner.chunk(2, -1) if call.is_gated else (inner, torch.ones((), dtype=inner.dtype))
        inner = gated(call.activation, gate, up)
        if activated is not None:
            activated[tokens, places] = inner
        rows = inner @ call.down_kernel[expert]
        if call.down_bias is not None:
            rows = rows + call.down_bias[expert]
        out.index_add_(0, tokens, rows.float() * call.topk_weights[tokens, places, None])
    results = {"out": out.to(getattr(torch, call.result_dtype))}
    return results if activated is None else {**results, "activated": activated}


def route_experts(call: RouteCall[Tensor]) -> dict[str, Tensor]:
    """Chooses experts by scores in float32. Nothing is checked."""
    logits = call.hidden_states.float() @ call.kernel.float()
    if call.bias is not None:
        logits = logits + call.bias.float()
    scores = logits.softmax(-1) if call.scoring_func == "softmax" else logits.sigmoid()
    choice = scores if call.correction_bias is None else scores + call.correction_bias
    if call.n_group > 1:
        groups = choice.unflatten(-1, (call.n_group, -1))
        best = groups.topk(2 if call.sums_two else 1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _first_largest(best, call.topk_group), True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = _first_largest(choice, call.top_k)
    weights = scores.gather(1, experts)
    if call.norm_topk_prob:
        # The sigmoids of a row may all be 0.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return {"topk_weights": weights * call.routed_scaling_factor, "topk_ids": experts.int()}


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Returns `act(gate) * up`."""
    if activation == "swigluoai":
        gate = gate.clamp(max=7)
        return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    if activation in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up
    if activation == "silu":
        return functional.silu(gate) * up
    gate = gate.relu()
    return (gate * gate if activation == "relu2" else gate) * up


def _first_largest(scores: Tensor, count: int) -> Tensor:
    # topk promises no order among equals.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
