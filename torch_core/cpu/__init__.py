"""The fast plain-torch implementation of every call, for CPU tensors and without any check.

`torch_core.run` checks a call and then runs it here; a caller that has checked already (at trace time, say) may run it
directly. Results do not depend on the other sequences of a batch, on where blocks lie in the cache, or on what unused
slots hold: bit for bit, for a fixed number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_core.calls import (
    Call,
    ChoiceCall,
    CopyCall,
    DenseBackwardCall,
    DenseCall,
    ExpertsCall,
    IndexerCall,
    LatentCall,
    LatentWriteCall,
    MergeCall,
    PagedCall,
    RotaryWriteCall,
    RouteCall,
    WriteCall,
)
from torch_core.cpu.backward import attention_backward
from torch_core.cpu.blocks import copy_blocks, write_kv_cache
from torch_core.cpu.choice import chosen_slots
from torch_core.cpu.dense import attention
from torch_core.cpu.experts import fused_experts, route_experts
from torch_core.cpu.indexer import indexer_logits
from torch_core.cpu.latent import mla_attention, write_latent_cache
from torch_core.cpu.merge import merge_states
from torch_core.cpu.paged import paged_attention
from torch_core.cpu.rotary import rotate_and_write
from torch_core.errors import Unsupported

__all__ = ["run_on_cpu"]

_FUNCTIONS: dict[type, Callable[[Any], dict[str, Tensor] | None]] = {
    PagedCall: paged_attention,
    LatentCall: mla_attention,
    DenseCall: attention,
    DenseBackwardCall: attention_backward,
    WriteCall: write_kv_cache,
    LatentWriteCall: write_latent_cache,
    RotaryWriteCall: rotate_and_write,
    CopyCall: copy_blocks,
    MergeCall: merge_states,
    IndexerCall: indexer_logits,
    ChoiceCall: chosen_slots,
    ExpertsCall: fused_experts,
    RouteCall: route_experts,
}


def run_on_cpu(call: Call[Tensor]) -> dict[str, Tensor]:
    """Computes a checked call; returns its results by name (`out`, `lse`), given ones included."""
    function = _FUNCTIONS.get(type(call))
    if function is None:
        raise Unsupported(f"{type(call).__name__} has no implementation for CPU tensors.")
    return function(call) or {}
