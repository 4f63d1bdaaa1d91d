"""The last steps of an attention call: sinks, value scale, output scale, the output's dtype and place."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.launch.cpu.gather import scale_value

__all__ = ["finish"]


def finish(
    output: Tensor,
    lse: Tensor,
    *,
    query_dtype: torch.dtype,
    out: Tensor | None,
    sinks: Tensor | None = None,
    v_scale: Tensor | float | None = None,
    out_scale: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the final output and lse.

    Args:
        output: float32 `[num_tokens, num_heads, head_size]` of real / v_scale.
        lse: float32 `[num_tokens, num_heads]`.
        query_dtype: the dtype of the result without `out`; bfloat16 instead of fp8.
        out: where the result goes, or None.
        sinks: `[num_heads]`: as if each softmax had had one more logit without a value. Rows that saw no key keep
            zeros and -inf.
        v_scale: factor on the output.
        out_scale: divisor of the output, for an fp8 `out`.
    """
    if sinks is not None:
        sinks = sinks.float()
        output = output * torch.sigmoid(lse - sinks)[..., None]
        lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks))
    factor = scale_value(v_scale) / scale_value(out_scale)
    if factor != 1.0:
        output = output * factor
    if out is None:
        dtype = query_dtype if query_dtype.itemsize > 1 else torch.bfloat16
        return (output if dtype is torch.float32 else output.to(dtype)), lse
    if out.dtype.itemsize == 1:
        largest = torch.finfo(out.dtype).max
        output = output.clamp(-largest, largest)
    return out.copy_(output), lse
