"""Cascade attention on torch tensors: a prefix that all sequences share is attended once."""

from __future__ import annotations

from torch import Tensor

from torch_core.attention import cascade
from torch_core.attention.call import PagedCall
from torch_core.attention.cascade import SharedPrefix
from torch_core.launch.run import run

__all__ = ["cascade_attention"]


def cascade_attention(call: PagedCall[Tensor], prefix: SharedPrefix[Tensor]) -> dict[str, Tensor]:
    """Computes what `run(call)` would, within rounding; see `torch_core.attention.cascade.cascade_attention`."""
    return cascade.cascade_attention(call, prefix, run)
