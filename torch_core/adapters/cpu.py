"""Low-rank adapters on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torch_core.adapters.call import LoraCall


def add_lora_linear(call: LoraCall[Tensor]) -> dict[str, Tensor]:
    """Adds the products of each slot's rows to `y`, in place, or to zeros. Nothing is checked."""
    if call.adds and call.y is not None:
        y = call.y
    else:
        y = call.x.new_zeros(call.result.shape) if call.y is None else call.y.clone()
    starts, slices, heads = call.lora_token_start_loc.tolist(), call.output_slices, call.num_heads
    for slot in range(call.num_slots):
        rows = call.token_indices_sorted_by_lora_ids[starts[slot] : starts[slot + 1]].long()
        if not len(rows):
            continue
        # The matrices of a head, or those of all.
        lora_a = call.lora_a[slot].view(call.first_heads, -1, call.lora_a.shape[2])
        lora_b = call.lora_b[slot].view(call.second_heads, -1, call.rank)
        x = call.x[rows // call.rows_of_input].view(len(rows), heads, -1)
        inner = (x.transpose(0, 1) @ lora_a.mT).split(call.rank, dim=2)
        products = [own @ matrix.mT for own, matrix in zip(inner, lora_b.split(slices, dim=1), strict=True)]
        y[rows] += torch.cat(products, dim=2).transpose(0, 1).reshape(len(rows), -1).to(y.dtype)
    if call.adds:
        return {"y": y}
    if call.activation is not None:
        gate, up = y.float().chunk(2, dim=1)
        y = (functional.silu(gate) * up).to(call.x.dtype)
    return {"out": y if call.out is None else call.out.copy_(y)}
