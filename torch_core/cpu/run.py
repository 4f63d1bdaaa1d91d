"""Which function computes a call on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_core.calls import Call, CopyCall, DenseBackwardCall, DenseCall, MergeCall, PagedCall, WriteCall
from torch_core.cpu.backward import attention_backward
from torch_core.cpu.blocks import copy_blocks, write_kv_cache
from torch_core.cpu.dense import attention
from torch_core.cpu.merge import merge_states
from torch_core.cpu.paged import paged_attention
from torch_core.errors import Unsupported

__all__ = ["run_on_cpu"]

_FUNCTIONS: dict[type, Callable[[Any], dict[str, Tensor] | None]] = {
    PagedCall: paged_attention,
    DenseCall: attention,
    DenseBackwardCall: attention_backward,
    WriteCall: write_kv_cache,
    CopyCall: copy_blocks,
    MergeCall: merge_states,
}


def run_on_cpu(call: Call[Tensor]) -> dict[str, Tensor]:
    """Computes a checked call; returns its results by name (`out`, `lse`), given ones included."""
    function = _FUNCTIONS.get(type(call))
    if function is None:
        raise Unsupported(f"{type(call).__name__} has no implementation for CPU tensors.")
    return function(call) or {}
