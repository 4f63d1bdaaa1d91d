"""Merging of two partial attention results for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.attention.cpu.gather import scale_value
from torch_core.attention.cpu.result import merge_lse, saturated
from torch_core.attention.merge_call import MergeCall


def merge_states(call: MergeCall[Tensor]) -> dict[str, Tensor]:
    """Merges two partial results in float32. Nothing is checked."""
    lse_a, lse_b = (torch.where(lse == torch.inf, -torch.inf, lse.float()) for lse in (call.lse_a, call.lse_b))
    if call.num_tokens_a is not None:
        lse_a = lse_a.clone()
        lse_a[call.num_tokens_a :] = -torch.inf
    weight, lse = merge_lse(lse_a, lse_b)
    weight = weight[..., None]
    part_a = torch.where((lse_a == -torch.inf)[..., None], 0, weight * call.out_a.float())
    part_b = torch.where((lse_b == -torch.inf)[..., None], 0, (1 - weight) * call.out_b.float())
    merged = part_a + part_b
    if call.out_scale is not None:
        merged = merged / scale_value(call.out_scale)
    dtype = getattr(torch, call.result_dtype)
    merged = saturated(merged, dtype)
    return {
        "out": merged.to(dtype) if call.out is None else call.out.copy_(merged),
        "lse": lse if call.lse is None else call.lse.copy_(lse),
    }
