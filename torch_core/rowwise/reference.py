"""The operations on rows in plain torch; they compute CPU tensors too."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall


def row_product(call: RowProductCall[Tensor]) -> dict[str, Tensor]:
    """Multiplies in float32. Nothing is checked."""
    wide = torch.promote_types(call.x.dtype, torch.float32)
    kernel = call.kernel.T if call.transposed else call.kernel
    return {"out": (call.x.to(wide) @ kernel.to(wide)).to(getattr(torch, call.result_dtype))}


def row_norm(call: RowNormCall[Tensor]) -> dict[str, Tensor]:
    """Normalises in float32. Nothing is checked."""
    dtype, wide = call.x.dtype, torch.promote_types(call.x.dtype, torch.float32)
    x = call.x.to(wide).unflatten(0, (-1, call.weight.shape[0]))
    if call.norm_type == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + call.epsilon)
    if call.norm_type == "rms_norm":
        return {"out": (x.to(dtype) * call.weight).flatten(0, 1)}
    weight = call.weight.to(wide)
    x = x * (1 + weight if call.norm_type == "gemma_rms_norm" else weight)
    if call.bias is not None:
        x = x + call.bias.to(wide)
    return {"out": x.to(dtype).flatten(0, 1)}


def row_logsumexp(call: RowLogSumExpCall[Tensor]) -> dict[str, Tensor]:
    """Sums in float32. Nothing is checked."""
    return {"out": call.x.logsumexp(-1)}
