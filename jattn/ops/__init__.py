"""Attention on JAX arrays: each op checks its arguments, chooses an implementation and crosses the bridge."""

from jattn.ops.cache import write_kv_cache, write_kv_cache_per_token_head
from jattn.ops.choose import IMPLEMENTATIONS, available_implementations
from jattn.ops.dense import attention, attention_with_lse
from jattn.ops.merge import merge_states
from jattn.ops.paged import paged_attention, paged_attention_with_lse

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "attention_with_lse",
    "available_implementations",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "write_kv_cache",
    "write_kv_cache_per_token_head",
]
