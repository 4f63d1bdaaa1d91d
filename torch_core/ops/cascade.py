"""Cascade attention on torch tensors: a prefix that all sequences share is attended once."""

from __future__ import annotations

from torch import Tensor

from torch_core import calls
from torch_core.calls import PagedCall, SharedPrefix
from torch_core.run import run

__all__ = ["cascade_attention"]


def cascade_attention(call: PagedCall[Tensor], prefix: SharedPrefix[Tensor]) -> dict[str, Tensor]:
    """Computes what `run(call)` would, within rounding; see `torch_core.calls.cascade_attention`."""
    return calls.cascade_attention(call, prefix, run)
