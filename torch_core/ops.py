"""The public torch operations: Triton launch plans on CUDA tensors, fast plain torch on CPU tensors."""

from torch_core.attention.torch import (
    attention,
    attention_backward,
    attention_with_lse,
    cascade_attention,
    dense_call,
    merge_states,
    paged_attention,
    paged_attention_with_lse,
    paged_call,
)
from torch_core.cache_writes.torch import copy_blocks, rotate_and_write, write_kv_cache
from torch_core.latent.packed import unpack_latents
from torch_core.latent.torch import (
    indexer_topk,
    mla_attention,
    mla_attention_with_lse,
    mla_call,
    sparse_mla_attention,
    sparse_mla_attention_with_lse,
    sparse_mla_call,
    write_latent_cache,
)
from torch_core.launch.run import run
from torch_core.state.torch import gated_delta_rule, mamba_chunk_scan

__all__ = [
    "attention",
    "attention_backward",
    "attention_with_lse",
    "cascade_attention",
    "copy_blocks",
    "dense_call",
    "gated_delta_rule",
    "indexer_topk",
    "mamba_chunk_scan",
    "merge_states",
    "mla_attention",
    "mla_attention_with_lse",
    "mla_call",
    "paged_attention",
    "paged_attention_with_lse",
    "paged_call",
    "rotate_and_write",
    "run",
    "sparse_mla_attention",
    "sparse_mla_attention_with_lse",
    "sparse_mla_call",
    "unpack_latents",
    "write_kv_cache",
    "write_latent_cache",
]
