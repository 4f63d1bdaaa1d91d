"""A layer of experts on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.calls import ExpertsCall

__all__ = ["fused_experts", "gated"]


def fused_experts(call: ExpertsCall[Tensor]) -> dict[str, Tensor]:
    """Runs each expert on the rows that go to it; sums in float32. Nothing is checked."""
    x = call.hidden_states
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(call.num_experts):
        tokens, places = (call.topk_ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        inner = x[tokens] @ call.gate_up_kernel[expert]
        if call.gate_up_bias is not None:
            inner = inner + call.gate_up_bias[expert]
        rows = gated(call.activation, inner) @ call.down_kernel[expert]
        if call.down_bias is not None:
            rows = rows + call.down_bias[expert]
        out.index_add_(0, tokens, rows.float() * call.topk_weights[tokens, places, None])
    return {"out": out.to(getattr(torch, call.result_dtype))}


def gated(activation: str, gate_up: Tensor) -> Tensor:
    """Returns `act(gate) * up` of `[..., gate | up]`."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "swigluoai":
        gate = gate.clamp(max=7)
        return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    if activation in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up
    if activation == "silu":
        return functional.silu(gate) * up
    gate = gate.relu()
    return (gate * gate if activation == "relu2" else gate) * up
