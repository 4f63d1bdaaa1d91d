"""Seeded problems of a linear map with what stands before and behind it."""

from __future__ import annotations

from typing import Any

import torch

from torch_core import reference
from torch_core.calls import LinearCall

__all__ = ["assert_linear_as_exact_as_torch", "linear_call"]


def linear_call(
    seed: int, num_tokens: int, *, in_size: int = 80, out_size: int = 48, dtype: str = "float32",
    activation: str | None = None, norm: bool = False, bias: bool = False, residual: bool = False,
) -> LinearCall[torch.Tensor]:  # fmt: skip
    """Draws a call."""
    torch.manual_seed(seed)
    kind, columns = getattr(torch, dtype), out_size if activation is None else 2 * out_size
    return LinearCall(
        hidden_states=3 * torch.randn(num_tokens, in_size).to(kind),
        kernel=(torch.randn(in_size, columns) / in_size**0.5).to(kind),
        bias=torch.randn(columns).to(kind) if bias else None,
        norm_weight=(1 + torch.randn(in_size) / 4).to(kind) if norm else None,
        residual=torch.randn(num_tokens, out_size).to(kind) if residual else None,
        activation=activation,
    )


def assert_linear_as_exact_as_torch(call: LinearCall[Any], out: torch.Tensor) -> None:
    """The error is at most twice that of the reference in the call's own type, and some roundings of the largest."""
    exact = reference.fused_linear(call)
    kind = call.hidden_states.dtype
    allowed = (reference.fused_linear(call, compute_dtype=kind).double() - exact).abs().max()
    allowed = 2 * (allowed + torch.finfo(kind).eps * exact.abs().max())
    assert out.dtype == kind
    assert (out.double() - exact).abs().max() <= allowed
