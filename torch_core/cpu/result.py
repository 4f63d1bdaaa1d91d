"""The last steps of an attention call: sinks, value and output scales, the output's dtype and place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_core.cpu.gather import scale_value

__all__ = ["ResultRows", "open_results"]


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Where the rows of one call go, and what is done to them on the way.

    Attributes:
        out: `[num_tokens, num_kv_heads, group_size, value_head_size]`, a view of the output.
        lse: float32 `[num_tokens, num_kv_heads, group_size]`, or None when nobody asked for it.
        sinks: float32 `[num_kv_heads, group_size]`, or None.
        factor: on every output row: value scale over output scale.
    """

    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    factor: float

    def store(self, rows: slice | Tensor | None, output: Tensor, lse: Tensor) -> None:
        """Stores computed rows.

        Args:
            rows: which tokens; None for all.
            output: float32 `[rows, num_kv_heads, group_size, value_head_size]`.
            lse: float32 `[rows, num_kv_heads, group_size]`; -inf marks rows that saw no key, which sinks leave alone.
        """
        if self.sinks is not None:
            output = output * torch.sigmoid(lse - self.sinks)[..., None]
            lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, self.sinks))
        if self.factor != 1.0:
            output = output * self.factor
        if self.out.dtype.itemsize == 1:
            largest = torch.finfo(self.out.dtype).max
            output = output.clamp(-largest, largest).to(self.out.dtype)
        _assign(self.out, rows, output)
        if self.lse is not None:
            _assign(self.lse, rows, lse)


def open_results(
    query: Tensor,
    num_kv_heads: int,
    value_head_size: int,
    *,
    num_stored: int,
    with_lse: bool,
    out: Tensor | None,
    sinks: Tensor | None,
    v_scale: Tensor | float | None,
    out_scale: Tensor | float | None,
) -> tuple[Tensor, Tensor | None, ResultRows]:
    """Returns the output, the lse (None without `with_lse`), and the record to store rows with.

    Args:
        query: `[num_tokens, num_heads, head_size]`; its dtype is the output's (bfloat16 for fp8) when `out` is None.
        num_kv_heads: key/value heads.
        value_head_size: elements of a value head.
        num_stored: rows that will be stored. When it is fewer than all, the rest is zeros and -inf.
        with_lse: whether the lse is wanted.
        out: where the output goes, or None.
        sinks: `[num_heads]`: as if each softmax had had one more logit without a value.
        v_scale: factor on the output.
        out_scale: divisor of the output.
    """
    num_tokens, num_heads, _ = query.shape
    heads = (num_kv_heads, num_heads // num_kv_heads)
    if out is None:
        dtype = query.dtype if query.dtype.itemsize > 1 else torch.bfloat16
        out = torch.empty(num_tokens, num_heads, value_head_size, dtype=dtype)
    if num_stored < num_tokens:
        out.zero_()
    lse = lse_by_head = None
    if with_lse:
        lse = torch.full((num_tokens, num_heads), -torch.inf)
        lse_by_head = lse.view(num_tokens, *heads)
    rows = ResultRows(
        out.view(num_tokens, *heads, value_head_size),
        lse_by_head,
        None if sinks is None else sinks.float().view(heads),
        1.0 if v_scale is None and out_scale is None else scale_value(v_scale) / scale_value(out_scale),
    )
    return out, lse, rows


def _assign(place: Tensor, rows: slice | Tensor | None, new: Tensor) -> None:
    if rows is None:
        place.copy_(new)
    elif place.dtype.itemsize == 1:
        place.view(torch.uint8)[rows] = new.view(torch.uint8)
    else:
        place[rows] = new.to(place.dtype) if isinstance(rows, Tensor) else new
