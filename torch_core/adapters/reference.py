"""The specification of low-rank adapters: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.adapters.call import LoraCall


def add_lora_linear(call: LoraCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns the new `y`, or `out`, in the compute dtype; given ones stay as they are."""
    starts = call.lora_token_start_loc.tolist()
    zeros = torch.zeros(len(call.x), call.lora_b.shape[1], dtype=compute_dtype, device=call.x.device)
    y = zeros if call.y is None else zeros + call.y.to(compute_dtype)
    for slot in range(call.num_slots):
        lora_a, lora_b = call.lora_a[slot].to(compute_dtype), call.lora_b[slot].to(compute_dtype)
        for row in call.token_indices_sorted_by_lora_ids[starts[slot] : starts[slot + 1]].tolist():
            inner = lora_a @ call.x[row].to(compute_dtype)
            first = 0
            for index, size in enumerate(call.output_slices):
                own = inner[index * call.rank : (index + 1) * call.rank]
                y[row, first : first + size] += lora_b[first : first + size] @ own
                first += size
    if call.activation is not None:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return {"y" if call.adds else "out": y}
