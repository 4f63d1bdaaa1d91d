"""Attention on CUDA tensors through the Triton plans; CPU tensors run in Triton's interpreter (tests, debugging)."""

from __future__ import annotations

from typing import Any

import torch

from torch_core.attention.choose import plan_attention, plan_paged_attention
from torch_core.plan.operands import ScaleSpec
from torch_core.run.launch import array_spec, device_limits, dtype_name, run_operation
from torch_core.specs import AttentionSpec

__all__ = ["attention", "attention_with_lse", "paged_attention", "paged_attention_with_lse"]

_Scale = float | torch.Tensor | None
_Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    query: torch.Tensor,
    kv_cache: _Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Returns the output of `paged_attention_with_lse`, which computes no lse then; same arguments."""
    arrays = (query, kv_cache, block_tables, seq_lens, query_start_loc)
    return _paged(*arrays, spec=spec, max_query_len=max_query_len, out=out, with_lse=False, **options)[0]


def paged_attention_with_lse(
    query: torch.Tensor,
    kv_cache: _Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The semantics are those of `torch_core.reference.paged_attention_with_lse`. No host sync and, after the first call
    with a shape, no work but the launches: it can be captured in a CUDA graph.

    Args:
        query: [num_tokens, num_heads, head_size].
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or a pair of key and value caches
            [num_blocks, block_size, num_kv_heads, head_size]; any strides with the last one 1.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs].
        query_start_loc: int32 [num_seqs + 1].
        spec: the static options.
        max_query_len: an upper bound on the query lengths; rows of longer queries are not computed.
        out: [num_tokens, num_heads, value_head_size], written; its dtype may be fp8, see `out_scale`.
        options: k_scale, v_scale, q_scale, out_scale (numbers or one-element float32 tensors), alibi_slopes, sinks,
            k_scale_cache, v_scale_cache, mm_prefix_range, qq_bias, seq_causal, kv_chunk_size; see
            `plan_paged_attention`.

    Returns:
        The output and the lse, float32 [num_tokens, num_heads], natural logarithm.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the Triton kernels do not serve this combination.
    """
    arrays = (query, kv_cache, block_tables, seq_lens, query_start_loc)
    return _paged(*arrays, spec=spec, max_query_len=max_query_len, out=out, with_lse=True, **options)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Returns the output of `attention_with_lse`, which computes no lse then; same arguments."""
    arrays = (query, key, value, query_start_loc, key_start_loc)
    return _dense(*arrays, spec=spec, max_query_len=max_query_len, out=out, with_lse=False, **options)[0]


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends sequences that are packed one after the other, queries and keys each with their own lengths.

    The semantics are those of `torch_core.reference.attention_with_lse`.

    Args:
        query: [num_tokens, num_heads, head_size].
        key: [num_keys, num_kv_heads, head_size].
        value: [num_keys, num_kv_heads, value_head_size].
        query_start_loc: int32 [num_seqs + 1].
        key_start_loc: int32 [num_seqs + 1].
        spec: the static options.
        max_query_len: an upper bound on the query lengths.
        max_key_len: not used; other implementations need it.
        out: [num_tokens, num_heads, value_head_size], written.
        options: out_scale, alibi_slopes, sinks, mm_prefix_range, qq_bias, seq_causal; see `plan_attention`.

    Returns:
        The output and the lse, float32 [num_tokens, num_heads], natural logarithm.

    Raises:
        InvalidInput: shapes, dtypes or strides do not fit together.
        Unsupported: the Triton kernels do not serve this combination.
    """
    arrays = (query, key, value, query_start_loc, key_start_loc)
    return _dense(*arrays, spec=spec, max_query_len=max_query_len, out=out, with_lse=True, **options)


def _paged(
    query: torch.Tensor,
    kv_cache: _Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: torch.Tensor | None,
    with_lse: bool,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    value = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[1]
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return _empty(query, value, out, with_lse)
    tensors = {
        "query": query,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    if isinstance(kv_cache, torch.Tensor):
        tensors["kv_cache"] = kv_cache
        cache_spec = array_spec(kv_cache)
    else:
        tensors["key_cache"], tensors["value_cache"] = kv_cache
        cache_spec = (array_spec(kv_cache[0]), array_spec(kv_cache[1]))
    plan = plan_paged_attention(
        array_spec(query),
        cache_spec,
        array_spec(block_tables),
        array_spec(seq_lens),
        array_spec(query_start_loc),
        spec=spec,
        max_query_len=max_query_len,
        with_lse=with_lse,
        limits=device_limits(query.device),
        **_out_options(query, out, tensors),
        **_option_specs(options, tensors),
    )
    return _run(plan, tensors, out, with_lse)


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: torch.Tensor | None,
    with_lse: bool,
    max_key_len: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    if query.shape[0] == 0 or query_start_loc.shape[0] < 2:
        return _empty(query, value, out, with_lse)
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "query_start_loc": query_start_loc,
        "key_start_loc": key_start_loc,
    }
    plan = plan_attention(
        *[array_spec(tensor) for tensor in tensors.values()],
        spec=spec,
        max_query_len=max_query_len,
        with_lse=with_lse,
        limits=device_limits(query.device),
        **_out_options(query, out, tensors),
        **_option_specs(options, tensors),
    )
    return _run(plan, tensors, out, with_lse)


def _out_options(query: torch.Tensor, out: torch.Tensor | None, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if out is None:
        return {}
    if out.is_contiguous() and out.data_ptr() % 16 == 0:
        return {"out_dtype": dtype_name(out.dtype)}
    tensors["out"] = out
    return {"out": array_spec(out)}


def _option_specs(options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, ScaleSpec]:
    specs: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            specs[name] = array_spec(value)
        elif value is not None:
            specs[name] = value if name == "kv_chunk_size" else float(value)
    return specs


def _run(
    plan: Any, tensors: dict[str, torch.Tensor], out: torch.Tensor | None, with_lse: bool
) -> tuple[torch.Tensor, Any]:
    given = {"out": out} if out is not None and "out" not in tensors else None
    results = run_operation(plan, tensors, given)
    return tensors["out"] if "out" in tensors else results["out"], results.get("lse")


def _empty(
    query: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None, with_lse: bool
) -> tuple[torch.Tensor, Any]:
    if out is None:
        dtype = query.dtype if query.dtype.itemsize > 1 else torch.bfloat16
        out = query.new_empty((*query.shape[:2], value.shape[-1]), dtype=dtype)
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32) if with_lse else None
    return out.zero_(), lse
