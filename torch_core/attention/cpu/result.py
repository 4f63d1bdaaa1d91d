"""The last steps of an attention call: sinks, value and output scales, the output's dtype and place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.call import AttentionCall
from torch_core.attention.cpu.gather import scale_value


@dataclass(frozen=True, slots=True)
class ResultRows:
    """The destination of a call's rows, and the operations on them before they are stored.

    Attributes:
        out: `[num_tokens, num_kv_heads, group_size, value_head_size]`, a view of the output.
        lse: float32 `[num_tokens, num_kv_heads, group_size]`, or None if the call does not ask for it.
        sinks: float32 `[num_kv_heads, group_size]`, or None.
        factor: factor of every output row: value scale over output scale.
    """

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    factor: float

    def store(self, rows: slice | Tensor, output: Tensor, lse: Tensor) -> None:
        """Stores computed rows.

        Args:
            rows: indices of the tokens.
            output: float32 `[rows, num_kv_heads, group_size, value_head_size]`.
            lse: float32 `[rows, num_kv_heads, group_size]`; -inf marks rows that saw no key, which sinks leave alone.
        """
        if self.sinks is not None:
            weight, with_sinks = merge_lse(lse, self.sinks)
            unseen = lse == -torch.inf
            # A sink of -inf is none: two empty parts have no weight.
            output = (output * weight[..., None]).masked_fill(unseen[..., None], 0)
            lse = torch.where(unseen, lse, with_sinks)
        if self.factor != 1.0:
            output = output * self.factor
        if self.out.dtype.itemsize == 1:
            output = saturated(output, self.out.dtype).to(self.out.dtype)
        _assign(self.out, rows, output)
        if self.lse is not None:
            _assign(self.lse, rows, lse)


def open_results(call: AttentionCall[Tensor]) -> tuple[dict[str, Tensor], ResultRows]:
    """Returns the results by name, zeros and -inf, and the record to store rows with."""
    num_tokens, num_heads, _ = call.query.shape
    heads = (call.num_kv_heads, call.group)
    shape = (num_tokens, num_heads, call.value_head_size)
    # All rows, and not those of no sequence alone: unchecked starts do not say which those are.
    out = torch.zeros(shape, dtype=getattr(torch, call.result_dtype)) if call.out is None else call.out.zero_()
    results, lse_by_head = {"out": out}, None
    if call.with_lse:
        results["lse"] = torch.full((num_tokens, num_heads), -torch.inf)
        lse_by_head = results["lse"].view(num_tokens, *heads)
    rows = ResultRows(
        out.view(num_tokens, *heads, call.value_head_size),
        lse_by_head,
        None if call.sinks is None else call.sinks.float().view(heads),
        scale_value(getattr(call, "v_scale", None)) / scale_value(call.out_scale),
    )
    return results, rows


def merge_lse(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight of a part a in the merge with a part b, and the lse of both, float32; the weight of two empty
    parts is NaN.

    numpy rounds an element equally at every position; torch's loops end in scalars that are rounded differently.
    """
    part_a, part_b = (lse.detach().double().numpy() for lse in (lse_a, lse_b))
    with np.errstate(invalid="ignore", over="ignore"):
        weight = 1 / (1 + np.exp(part_b - part_a))
        total = np.logaddexp(part_a, part_b)
    return torch.from_numpy(weight).float(), torch.from_numpy(total).float()


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values that fit an 8-bit type, those beyond its range as its largest; others as they are."""
    if dtype.itemsize > 1:
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def _assign(place: Tensor, rows: slice | Tensor, new: Tensor) -> None:
    if place.dtype.itemsize == 1:
        place.view(torch.uint8)[rows] = new.view(torch.uint8)
    else:
        place[rows] = new.to(place.dtype) if isinstance(rows, Tensor) else new
