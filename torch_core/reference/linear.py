"""A linear map with what stands before and behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.calls import LinearCall
from torch_core.reference.experts import activated

__all__ = ["fused_linear"]


def fused_linear(call: LinearCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns `[num_tokens, out_size]`: `residual + act(rms_norm(x) @ kernel + bias)`.

    Example:
        >>> call = LinearCall(hidden_states=torch.full((1, 2), 3.0), kernel=torch.ones(2, 1),
        ...     norm_weight=torch.tensor([1.0, 2.0]), norm_epsilon=0.0, residual=torch.ones(1, 1))
        >>> fused_linear(call).item()
        4.0
    """
    x = call.hidden_states.to(compute_dtype)
    if call.norm_weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + call.norm_epsilon).sqrt() * call.norm_weight.to(compute_dtype)
    out = x @ call.kernel.to(compute_dtype)
    if call.bias is not None:
        out = out + call.bias.to(compute_dtype)
    if call.activation is not None:
        out = activated(call.activation, *out.chunk(2, -1))
    return out if call.residual is None else call.residual.to(compute_dtype) + out
