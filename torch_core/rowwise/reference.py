"""The operations on rows in plain torch; they compute CPU tensors too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.rowwise.call import RowLogSumExpCall, RowNormCall, RowProductCall, RowQuantizeCall


def row_product(call: RowProductCall[Tensor]) -> dict[str, Tensor]:
    """Multiplies in float32. Nothing is checked."""
    wide = torch.promote_types(call.x.dtype, torch.float32)
    kernel = call.kernel.T if call.transposed else call.kernel
    out = call.x.to(wide) @ kernel.to(wide)
    if call.activation is not None:
        gate, up = out.chunk(2, 1)
        out = functional.silu(gate) * up
    return {"out": out.to(getattr(torch, call.result_dtype))}


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


def row_quantize(call: RowQuantizeCall[Tensor]) -> dict[str, Tensor]:
    """Computes each step in float32 and rounds it. Nothing is checked; rows that are undefined are 0."""
    rounded = getattr(torch, call.rounded_dtype)
    x = call.x[: call.num_rows].float()
    if call.row_scale is not None:
        x = x * call.row_scale[:, None]
    if call.column_scale is not None:
        x = x * call.column_scale
    if call.activation is not None:
        gate, up = x.chunk(2, 1)
        is_silu = call.activation == "silu"
        x = up * (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh"))
    results = {}
    if call.residual is not None:
        results["stream"] = (call.residual.float() + x).to(rounded)
        x = results["stream"].float()
    if call.weight is not None:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + call.epsilon)
        x = x.to(rounded).float() if call.norm_type == "rms_norm" else x
        x = x * (call.weight.float() + (call.norm_type == "gemma_rms_norm"))
    largest = x.abs().amax(1)
    # Not 0, for rows of zeros; torch's maximum keeps NaN.
    scale = (largest / 448).clamp_min(torch.finfo(torch.float32).tiny)
    values = torch.zeros(call.outputs()["values"].shape, dtype=torch.float8_e4m3fn, device=x.device)
    values[: call.num_rows] = (x / scale[:, None]).to(values.dtype)
    return {"values": values, "scale": scale, **results}
