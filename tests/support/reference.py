"""The reference by keywords, as the operations take them."""

from __future__ import annotations

from typing import Any

import torch

from torch_core import reference
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.checks import cache_fields
from torch_core.attention.merge_call import MergeCall
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.latent.call import LatentCall

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "mla_attention_with_lse",
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


def mla_attention_with_lse(
    *, compute_dtype: torch.dtype | None = None, **fields: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.mla_attention(LatentCall(**fields), compute_dtype=compute_dtype)


def attention_with_lse(
    query: torch.Tensor, *args: torch.Tensor, compute_dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = {**dict(zip(_DENSE, args, strict=False)), **options}
    arrays.setdefault("max_query_len", query.shape[0])
    return reference.attention(DenseCall(query=query, **arrays), compute_dtype=compute_dtype)


def attention(*args: Any, **options: Any) -> torch.Tensor:
    return attention_with_lse(*args, **options)[0]


def write_kv_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: torch.Tensor, **scales: Any
) -> None:
    reference.write_kv_cache(
        WriteCall(key=key, value=value, **cache_fields(kv_cache), slot_mapping=slot_mapping, **scales)
    )


def copy_blocks(kv_caches: torch.Tensor | list[torch.Tensor], block_mapping: torch.Tensor) -> None:
    for kv_cache in [kv_caches] if isinstance(kv_caches, torch.Tensor) else kv_caches:
        reference.copy_blocks(CopyCall(kv_cache=kv_cache, block_mapping=block_mapping))


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.merge_states(MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b))
