"""Low-rank adapters on CPU tensors."""

from __future__ import annotations

from torch import Tensor

from torch_core.adapters.call import LoraCall


def add_lora_linear(call: LoraCall[Tensor]) -> dict[str, Tensor]:
    """Adds the products of each slot's rows to `y`, in place, or to zeros. Nothing is checked."""
    y = call.y
    if y is None:
        y = call.x.new_empty(len(call.x), call.lora_b.shape[1]) if call.out is None else call.out
        y.zero_()
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
    return {"out" if call.y is None else "y": y}
