"""Seeded calls of low-rank adapters, with poison in all that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_core import reference
from torch_core.adapters.call import LoraCall

__all__ = ["allowed_error", "lora_call"]


def lora_call(
    seed: int, slots: Sequence[int] = (2, -1, 0, 2, 2), *, num_slots: int = 4, in_size: int = 20,
    slices: tuple[int, ...] = (12,), rank: int = 3, dtype: str = "float32", y_dtype: str | None = None,
    adds: bool = True, activation: str | None = None, heads: tuple[int, int] | None = None, rows_of_input: int = 1,
) -> Any:  # fmt: skip
    """Draws a LoraCall for rows of these slots, -1 for none.

    Matrices of slots without rows, inputs of rows without a slot, and the last entries of the order are poison; the
    last entries are the rows without a slot if all rows are written. `heads` are those with a first matrix and with a
    second matrix of their own; sizes are those of a head.
    """
    firsts, seconds = heads or (1, 1)
    num_heads = max(firsts, seconds)
    torch.manual_seed(seed)
    kind, given = getattr(torch, dtype), torch.tensor(slots)
    num_inputs = len(slots) // rows_of_input
    x, y = torch.randn(num_inputs, num_heads * in_size), torch.randn(len(slots), num_heads * sum(slices))
    x, lora_a = x.to(kind), torch.randn(num_slots, firsts * len(slices) * rank, in_size).to(kind)
    lora_b = torch.randn(num_slots, seconds * sum(slices), rank).to(kind)
    x[(given < 0).view(num_inputs, -1).all(1)] = torch.nan
    unused = [slot for slot in range(num_slots) if slot not in slots]
    lora_a[unused], lora_b[unused] = torch.nan, torch.nan
    order = [row for slot in range(num_slots) for row in range(len(slots)) if slots[row] == slot]
    rest = [row for row in range(len(slots)) if slots[row] < 0]
    starts = [0, *torch.tensor([(given == slot).sum() for slot in range(num_slots)]).cumsum(0).tolist()]
    return LoraCall(
        x=x,
        y=y.to(getattr(torch, y_dtype or dtype)) if adds else None,
        lora_a=lora_a,
        lora_b=lora_b,
        token_indices_sorted_by_lora_ids=torch.tensor(
            [*order, *([1 << 30] * len(rest) if adds and activation is None else rest)]
        ).int(),
        lora_token_start_loc=torch.tensor(starts).int(),
        output_slices=slices,
        num_heads=num_heads,
        activation=activation,
    )


def allowed_error(call: Any, exact: torch.Tensor) -> torch.Tensor:
    """Twice the error of the reference in float32, with both products rounded to the operands' type."""
    (rounded,) = reference.add_lora_linear(call, compute_dtype=torch.float32).values()
    y = call.y if call.adds else torch.zeros_like(exact, dtype=call.x.dtype)
    rounded = rounded.to(y.dtype).double()
    inner = torch.finfo(call.x.dtype).eps * (exact - y.double()).abs().max()
    eps = torch.finfo(y.dtype).eps
    return 2 * ((rounded - exact).abs().max() + inner + eps * exact.abs().max())
