"""The public torch operations: Triton launch plans on CUDA tensors, fast plain torch on CPU tensors."""

from torch_core.ops.public import (
    attention,
    attention_with_lse,
    copy_blocks,
    merge_states,
    paged_attention,
    paged_attention_with_lse,
    write_kv_cache,
)

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "write_kv_cache",
]
