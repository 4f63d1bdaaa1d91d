"""Which function computes a call on CPU tensors."""

from __future__ import annotations

from torch import Tensor

from torch_core.calls import Call, CopyCall, DenseBackwardCall, DenseCall, MergeCall, PagedCall, WriteCall
from torch_core.cpu.backward import attention_backward
from torch_core.cpu.blocks import copy_blocks, write_kv_cache
from torch_core.cpu.dense import attention
from torch_core.cpu.merge import merge_states
from torch_core.cpu.paged import paged_attention
from torch_core.errors import Unsupported

__all__ = ["run_on_cpu"]


def run_on_cpu(call: Call[Tensor]) -> dict[str, Tensor]:
    """Computes a checked call; returns its results by name (`out`, `lse`), given ones included."""
    if isinstance(call, PagedCall):
        return paged_attention(call)
    if isinstance(call, DenseBackwardCall):
        return attention_backward(call)
    if isinstance(call, DenseCall):
        return attention(call)
    if isinstance(call, WriteCall):
        write_kv_cache(call)
        return {}
    if isinstance(call, CopyCall):
        copy_blocks(call)
        return {}
    if isinstance(call, MergeCall):
        return merge_states(call)
    raise Unsupported(f"{type(call).__name__} has no implementation for CPU tensors.")
