"""Merging of two partial attention results for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.cpu.gather import scale_value

__all__ = ["merge_states"]


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    out_scale: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges two partial results in float32; see `torch_core.run`. Nothing is checked."""
    dtype, lse_dtype = out_a.dtype, lse_a.dtype
    lse_a, lse_b = lse_a.float(), lse_b.float()
    lse_a = torch.where(lse_a == torch.inf, -torch.inf, lse_a)
    lse_b = torch.where(lse_b == torch.inf, -torch.inf, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    # The weight of a is a sigmoid of the difference; two empty states make it NaN, which no branch below uses.
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    part_a = torch.where((lse_a == -torch.inf)[..., None], 0, weight * out_a.float())
    part_b = torch.where((lse_b == -torch.inf)[..., None], 0, (1 - weight) * out_b.float())
    merged = part_a + part_b
    if out is None:
        return merged.to(dtype), lse.to(lse_dtype)
    if out_scale is not None:
        largest = torch.finfo(out.dtype).max
        merged = (merged / scale_value(out_scale)).clamp(-largest, largest)
    return out.copy_(merged), lse.to(lse_dtype)
