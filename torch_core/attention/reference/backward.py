"""The derivative of dense attention: torch's autograd through the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.attention.backward_call import DenseBackwardCall, forward_of
from torch_core.attention.reference.attention import attention


def attention_backward(
    call: DenseBackwardCall[Tensor], *, compute_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns the gradients by name (`DenseBackwardCall.outputs`), in `compute_dtype` (the query's when None).

    The forward pass is computed again: `out` and `lse` are not read.

    Raises:
        InvalidInput: as `attention`.
    """
    compute_dtype = compute_dtype or call.query.dtype
    names = [name.removeprefix("d_") for name in call.outputs()]
    leaves = {name: getattr(call, name).detach().cpu().to(compute_dtype, copy=True).requires_grad_() for name in names}
    real = torch.arange(call.num_tokens) < call.query_start_loc[-1].item()
    d_out = call.d_out.cpu().to(compute_dtype).masked_fill(~real[:, None, None], 0)
    with torch.enable_grad():
        out, lse = attention(forward_of(call).with_arrays(leaves), compute_dtype=compute_dtype)
        loss = (out * d_out).sum()
        if call.d_lse is not None:
            seen = lse > -torch.inf
            loss = loss + (lse.masked_fill(~seen, 0) * call.d_lse.cpu().to(lse.dtype).masked_fill(~seen, 0)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"d_{name}": gradient for name, gradient in zip(names, found, strict=True)}
