"""The specification of low-rank adapters: one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.adapters.call import LoraCall


def add_lora_linear(call: LoraCall[Tensor], *, compute_dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns the new `y`, or `out`, in the compute dtype; given ones stay as they are."""
    starts, heads, size = call.lora_token_start_loc.tolist(), call.num_heads, sum(call.output_slices)
    zeros = torch.zeros(call.num_rows, heads * size, dtype=compute_dtype, device=call.x.device)
    y = zeros if call.y is None else zeros + call.y.to(compute_dtype)
    for slot in range(call.num_slots):
        firsts = call.lora_a[slot].to(compute_dtype).chunk(call.first_heads) * (heads // call.first_heads)
        seconds = call.lora_b[slot].to(compute_dtype).chunk(call.second_heads) * (heads // call.second_heads)
        for row in call.token_indices_sorted_by_lora_ids[starts[slot] : starts[slot + 1]].tolist():
            parts = call.x[row // call.rows_of_input].to(compute_dtype).chunk(heads)
            for head, (lora_a, lora_b, part) in enumerate(zip(firsts, seconds, parts, strict=True)):
                inner, first = lora_a @ part, 0
                for index, columns in enumerate(call.output_slices):
                    own = inner[index * call.rank : (index + 1) * call.rank]
                    target = y[row, head * size + first : head * size + first + columns]
                    target += lora_b[first : first + columns] @ own
                    first += columns
    if call.activation is not None:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return {"y" if call.adds else "out": y}
