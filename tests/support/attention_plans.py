"""Attention calls and plans of ordinary shapes, for the tests that change one thing about them."""

from __future__ import annotations

from typing import Any

from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall, PagedCall
from torch_core.attention.checks import cache_fields
from torch_core.base.specs import ArraySpec, AttentionSpec
from torch_core.latent.call import LatentCall
from torch_core.launch.plan import DeviceLimits, OperationPlan
from torch_core.launch.planner import plan_call

__all__ = [
    "SPEC",
    "backward_call",
    "backward_plan",
    "dense_call",
    "dense_plan",
    "latent_call",
    "paged_call",
    "paged_plan",
]

SPEC = AttentionSpec(scale=0.1)


def paged_call(
    *, num_seqs: int = 4, num_tokens: int | None = None, head_size: int = 128, **changes: Any
) -> PagedCall[ArraySpec]:
    """Makes a decode step of 8 query and 2 key/value heads, one token for each sequence unless told else."""
    arguments: dict[str, Any] = {
        "query": ArraySpec((num_seqs if num_tokens is None else num_tokens, 8, head_size), "bfloat16"),
        "block_tables": ArraySpec((num_seqs, 512), "int32"),
        "seq_lens": ArraySpec((num_seqs,), "int32"),
        "query_start_loc": ArraySpec((num_seqs + 1,), "int32"),
        "spec": SPEC,
        "max_query_len": 1,
        **changes,
    }
    kv_cache = arguments.pop("kv_cache", ArraySpec((64, 2, 16, 2, head_size), "bfloat16"))
    return PagedCall(**cache_fields(kv_cache), **arguments)


def paged_plan(*, limits: DeviceLimits | None = None, **changes: Any) -> OperationPlan:
    """Plans `paged_call`."""
    return plan_call(paged_call(**changes), limits)


def latent_call(
    dtype: str = "bfloat16",
    *,
    num_seqs: int = 4,
    num_heads: int = 16,
    query_len: int = 1,
    rank: int = 512,
    rope_dim: int = 64,
    block_size: int = 64,
    cache_dtype: str | None = None,
    table_tokens: int = 8192,
    **changes: Any,
) -> LatentCall[ArraySpec]:
    """Makes a decode step of DeepSeek's latent attention."""
    arguments: dict[str, Any] = {
        "query": ArraySpec((num_seqs * query_len, num_heads, rank + rope_dim), dtype),
        "latent_cache": ArraySpec((256, block_size, rank + rope_dim), cache_dtype or dtype),
        "block_tables": ArraySpec((num_seqs, table_tokens // block_size), "int32"),
        "seq_lens": ArraySpec((num_seqs,), "int32"),
        "query_start_loc": ArraySpec((num_seqs + 1,), "int32"),
        **changes,
    }
    return LatentCall(**arguments, spec=SPEC, max_query_len=query_len, kv_lora_rank=rank)


def dense_call(**changes: Any) -> DenseCall[ArraySpec]:
    """Makes two sequences of 300 tokens together, 8 query and 2 key/value heads."""
    arguments: dict[str, Any] = {
        "query": ArraySpec((300, 8, 128), "bfloat16"),
        "key": ArraySpec((300, 2, 128), "bfloat16"),
        "value": ArraySpec((300, 2, 128), "bfloat16"),
        "query_start_loc": ArraySpec((3,), "int32"),
        "key_start_loc": ArraySpec((3,), "int32"),
        "spec": SPEC,
        "max_query_len": 200,
        **changes,
    }
    return DenseCall(**arguments)


def dense_plan(*, limits: DeviceLimits | None = None, **changes: Any) -> OperationPlan:
    """Plans `dense_call`."""
    return plan_call(dense_call(**changes), limits)


def backward_call(*, with_d_lse: bool = False, **changes: Any) -> DenseBackwardCall[ArraySpec]:
    """Makes the backward call of `dense_call`."""
    forward = dense_call(**changes)
    out = ArraySpec((forward.num_tokens, forward.num_heads, forward.value_head_size), forward.result_dtype)
    lse = ArraySpec(out.shape[:2], "float32")
    return backward_of(forward, out=out, lse=lse, d_out=out, d_lse=lse if with_d_lse else None)


def backward_plan(*, limits: DeviceLimits | None = None, **changes: Any) -> OperationPlan:
    """Plans `backward_call`."""
    return plan_call(backward_call(**changes), limits)
