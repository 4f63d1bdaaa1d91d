"""Attention plans of ordinary shapes, for the tests that change one thing about them."""

from __future__ import annotations

from typing import Any

from torch_core.attention.choose import plan_attention, plan_paged_attention
from torch_core.plan.plan import ArraySpec, OperationPlan
from torch_core.specs import AttentionSpec

__all__ = ["SPEC", "dense_plan", "paged_plan"]

SPEC = AttentionSpec(scale=0.1)


def paged_plan(
    *, num_seqs: int = 4, num_tokens: int | None = None, head_size: int = 128, **changes: Any
) -> OperationPlan:
    """Plans a decode step of 8 query and 2 key/value heads, one token for each sequence unless told else."""
    arguments: dict[str, Any] = {
        "query": ArraySpec((num_seqs if num_tokens is None else num_tokens, 8, head_size), "bfloat16"),
        "kv_cache": ArraySpec((64, 2, 16, 2, head_size), "bfloat16"),
        "block_tables": ArraySpec((num_seqs, 512), "int32"),
        "seq_lens": ArraySpec((num_seqs,), "int32"),
        "query_start_loc": ArraySpec((num_seqs + 1,), "int32"),
        "spec": SPEC,
        "max_query_len": 1,
        **changes,
    }
    arrays = [arguments.pop(n) for n in ("query", "kv_cache", "block_tables", "seq_lens", "query_start_loc")]
    return plan_paged_attention(*arrays, **arguments)


def dense_plan(**changes: Any) -> OperationPlan:
    """Plans two sequences of 300 tokens together, 8 query and 2 key/value heads."""
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
    arrays = [arguments.pop(n) for n in ("query", "key", "value", "query_start_loc", "key_start_loc")]
    return plan_attention(*arrays, **arguments)
