"""A linear map with what stands before and behind it, on CPU tensors."""

from __future__ import annotations

from torch import Tensor

from torch_core.calls import LinearCall
from torch_core.cpu.experts import gated

__all__ = ["fused_linear"]


def fused_linear(call: LinearCall[Tensor]) -> dict[str, Tensor]:
    """Computes the parts one after the other; the norm in float32. Nothing is checked."""
    x = call.hidden_states
    if call.norm_weight is not None:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + call.norm_epsilon).rsqrt()
        x = wide.to(x.dtype) * call.norm_weight
    out = x @ call.kernel
    if call.bias is not None:
        out = out + call.bias
    if call.activation is not None:
        out = gated(call.activation, out)
    return {"out": out if call.residual is None else call.residual + out}
