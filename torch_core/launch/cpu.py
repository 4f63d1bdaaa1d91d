"""The fast plain-torch implementation of every call, for CPU tensors and without any check.

`torch_core.launch.run` checks a call and then runs it here; a caller that has checked already (at trace time, say)
may run it
directly. Results do not depend on the other sequences of a batch, on where blocks lie in the cache, or on what unused
slots hold: bit for bit, for a fixed number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.cpu.backward import attention_backward
from torch_core.attention.cpu.dense import attention
from torch_core.attention.cpu.merge import merge_states
from torch_core.attention.cpu.paged import paged_attention
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import Unsupported
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.cpu.blocks import copy_blocks, write_kv_cache
from torch_core.cache_writes.cpu.rotary import rotate_and_write
from torch_core.cache_writes.rotary_call import RotaryWriteCall
from torch_core.experts.call import ExpertsCall
from torch_core.experts.cpu import fused_experts, route_experts
from torch_core.experts.routing_call import RouteCall
from torch_core.latent.call import LatentCall, LatentWriteCall
from torch_core.latent.cpu.choice import chosen_slots
from torch_core.latent.cpu.indexer import indexer_logits
from torch_core.latent.cpu.latent import mla_attention, write_latent_cache
from torch_core.latent.sparse_call import ChoiceCall, IndexerCall
from torch_core.launch.call import Call

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
