"""How two attention results over disjoint sets of keys become the result over their union."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.attention.merge_call import MergeCall


def merge_states(call: MergeCall[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges two partial attention results (FlashDecoding; section 3.1 of FlashInfer, arXiv 2501.01005).

    The lse is `log(exp(lse_a) + exp(lse_b))`, the output `exp(lse_a - lse) out_a + exp(lse_b - lse) out_b`. A state
    with lse -inf is empty: its output is not read. +inf counts as empty too: FlashAttention-2 writes it for rows
    without keys. Two empty states give zeros and -inf. If both parts had the same sink, it counts twice: give it to one
    part only.

    Only the four arrays of the call are read: a new output is made.

    Returns:
        The merged output in the dtype of `out_a` and the merged lse in the dtype of `lse_a`. The arithmetic is
        float32, or float64 when a float64 tensor comes in.

    Example:
        >>> one, two = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0)
        >>> lse = torch.zeros(1, 1)
        >>> merge_states(MergeCall(out_a=one, lse_a=lse, out_b=two, lse_b=lse))[0].item()
        1.5
    """
    out_a, lse_a, out_b, lse_b = call.out_a, call.lse_a, call.out_b, call.lse_b
    dtype = torch.float64 if torch.float64 in (out_a.dtype, out_b.dtype, lse_a.dtype, lse_b.dtype) else torch.float32
    parts = []
    for part_out, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        part_lse = part_lse.to(dtype).masked_fill(part_lse == torch.inf, -torch.inf)
        parts.append((part_out.to(dtype).masked_fill((part_lse == -torch.inf)[..., None], 0), part_lse))
    (a, a_lse), (b, b_lse) = parts
    # The weights are taken relative to the larger lse: an lse of some thousands has too few digits to subtract from.
    shift = torch.maximum(a_lse, b_lse)
    shift = shift.masked_fill(shift == -torch.inf, 0)
    a_weight, b_weight = torch.exp(a_lse - shift), torch.exp(b_lse - shift)
    total = a_weight + b_weight
    out = (a_weight[..., None] * a + b_weight[..., None] * b) / total.masked_fill(total == 0, 1)[..., None]
    return out.to(out_a.dtype), (total.log() + shift).to(lse_a.dtype)
