"""Merging of two partial attention results for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_states"]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two partial results in float32; see `torch_core.launch`. Nothing is checked."""
    dtype, lse_dtype = out_a.dtype, lse_a.dtype
    lse_a, lse_b = lse_a.float(), lse_b.float()
    lse_a = torch.where(lse_a == torch.inf, -torch.inf, lse_a)
    lse_b = torch.where(lse_b == torch.inf, -torch.inf, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    # The weight of a is a sigmoid of the difference; two empty states make it NaN, which no branch below uses.
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    part_a = torch.where((lse_a == -torch.inf)[..., None], 0, weight * out_a.float())
    part_b = torch.where((lse_b == -torch.inf)[..., None], 0, (1 - weight) * out_b.float())
    return (part_a + part_b).to(dtype), lse.to(lse_dtype)
