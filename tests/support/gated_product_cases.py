"""A product with a gate's activation for the kernel of Hopper: inputs, and what is allowed of a result."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from torch_core.rowwise.call import RowProductCall


def gated_product(
    seed: int, num_rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> RowProductCall[torch.Tensor]:
    random = np.random.default_rng(seed)
    x, kernel = (torch.from_numpy(random.standard_normal(each)) for each in ((num_rows, inputs), (inputs, 2 * outputs)))
    return RowProductCall(x=x.to(dtype), kernel=(kernel / inputs**0.5).to(dtype), activation="silu")


def assert_as_exact_as_torch(call: RowProductCall[torch.Tensor], out: torch.Tensor) -> None:
    """The error is at most twice that of torch's own steps in the call's type, and some roundings of the largest."""
    exact, rounded = (
        _computed(call.x.to(wide), call.kernel.to(wide)).double() for wide in (torch.double, call.x.dtype)
    )
    allowed = (rounded - exact).abs().max() + torch.finfo(call.x.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= 2 * allowed


def _computed(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ kernel).chunk(2, 1)
    return functional.silu(gate) * up
