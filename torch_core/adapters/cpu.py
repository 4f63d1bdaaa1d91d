"""Low-rank adapters on CPU tensors."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from torch_core.adapters.call import LoraCall


def add_lora_linear(call: LoraCall[Tensor]) -> dict[str, Tensor]:
    """Adds the products of each slot's rows to `y`, in place, or to zeros. Nothing is checked."""
    if call.adds and call.y is not None:
        y = call.y
    else:
        y = call.x.new_zeros(len(call.x), call.lora_b.shape[1]) if call.y is None else call.y.clone()
    starts, slices = call.lora_token_start_loc.tolist(), call.output_slices
    for slot in range(call.num_slots):
        rows = call.token_indices_sorted_by_lora_ids[starts[slot] : starts[slot + 1]].long()
        if not len(rows):
            continue
        inner = (call.x[rows] @ call.lora_a[slot].T).split(call.rank, dim=1)
        matrices = call.lora_b[slot].split(slices)
        first = 0
        for own, matrix, size in zip(inner, matrices, slices, strict=True):
            y[rows, first : first + size] += (own @ matrix.T).to(y.dtype)
            first += size
    if call.adds:
        return {"y": y}
    if call.activation is not None:
        gate, up = y.float().chunk(2, dim=1)
        y = (functional.silu(gate) * up).to(call.x.dtype)
    return {"out": y if call.out is None else call.out.copy_(y)}
