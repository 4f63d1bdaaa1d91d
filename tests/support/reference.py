"""The reference by keywords, as the operations take them."""

from __future__ import annotations

from typing import Any

import torch

from torch_core import reference
from torch_core.calls import DenseCall, PagedCall, cache_fields
from torch_core.reference import copy_blocks, merge_states, write_kv_cache

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "write_kv_cache",
]

_PAGED = ("block_tables", "seq_lens", "query_start_loc")
_DENSE = ("key", "value", "query_start_loc", "key_start_loc")


def paged_attention_with_lse(
    query: torch.Tensor, kv_cache: Any, *args: torch.Tensor, compute_dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = {**dict(zip(_PAGED, args, strict=False)), **options}
    arrays.setdefault("max_query_len", query.shape[0])
    return reference.paged_attention(
        PagedCall(query=query, **cache_fields(kv_cache), **arrays), compute_dtype=compute_dtype
    )


def paged_attention(*args: Any, **options: Any) -> torch.Tensor:
    return paged_attention_with_lse(*args, **options)[0]


def attention_with_lse(
    query: torch.Tensor, *args: torch.Tensor, compute_dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = {**dict(zip(_DENSE, args, strict=False)), **options}
    arrays.setdefault("max_query_len", query.shape[0])
    return reference.attention(DenseCall(query=query, **arrays), compute_dtype=compute_dtype)


def attention(*args: Any, **options: Any) -> torch.Tensor:
    return attention_with_lse(*args, **options)[0]
