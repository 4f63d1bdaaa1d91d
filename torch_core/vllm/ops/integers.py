"""Integers as vLLM passes them, int32 or int64, where this project's calls take int32."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.base.checks import INT32_MAX
from torch_core.base.errors import InvalidInput

__all__ = ["as_int32"]


def as_int32(name: str, values: Tensor) -> Tensor:
    """Returns integers as int32; negative ones, which mean nothing at all, stay negative.

    On a CPU, if values are checked, a number that does not fit is refused: truncated to 32 bits it would be another
    slot, block or length. On CUDA the caller is responsible for it, as for every value.

    Raises:
        InvalidInput: no integers, or one that does not fit.
    """
    if values.dtype == torch.int32:
        return values
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InvalidInput(name, f"is {values.dtype}", "it must hold integers")
    if values.device.type == "cpu":
        wide = (values > INT32_MAX).nonzero()
        if len(wide):
            first = wide[0].tolist()
            raise InvalidInput(f"{name}{first}", f"is {values[tuple(first)].item()}", "it must fit an int32")
        values = values.clamp(min=-INT32_MAX)
    return values.to(torch.int32)
