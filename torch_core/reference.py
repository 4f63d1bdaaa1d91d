"""The specification of every attention and cache operation: plain torch, one sequence at a time, written to be read.

The fast implementations are tested against this package. Attention takes a call and returns output and lse.
It makes no attempt at speed. `compute_dtype=torch.float64` gives the oracle of the tests; `compute_dtype=query.dtype`
gives the "same-dtype torch reference" whose error bounds the error that a kernel may have.
"""

from torch_core.attention.reference.attention import attention, paged_attention
from torch_core.attention.reference.backward import attention_backward
from torch_core.attention.reference.merge import merge_states
from torch_core.cache_writes.reference.cache import copy_blocks, write_kv_cache
from torch_core.cache_writes.reference.rotary import rotate_and_write
from torch_core.experts.reference.experts import fused_experts
from torch_core.experts.reference.routing import route_experts
from torch_core.latent.reference.latent import mla_attention, write_latent_cache
from torch_core.latent.reference.sparse import indexer_logits, sparse_mla_attention

__all__ = [
    "attention",
    "attention_backward",
    "copy_blocks",
    "fused_experts",
    "indexer_logits",
    "merge_states",
    "mla_attention",
    "paged_attention",
    "rotate_and_write",
    "route_experts",
    "sparse_mla_attention",
    "write_kv_cache",
    "write_latent_cache",
]
