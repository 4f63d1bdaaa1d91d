"""Attention on torch tensors by keywords: each function makes a call and runs it where its tensors are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from torch_core.attention import cascade
from torch_core.attention.backward_call import backward_of
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall, cache_fields
from torch_core.attention.cascade import SharedPrefix
from torch_core.attention.merge_call import MergeCall
from torch_core.base.checks import call_named
from torch_core.base.specs import AttentionSpec
from torch_core.launch.run import run
from torch_core.launch.tensors import dtype_name

_P = ParamSpec("_P")


def paged_call(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    q_scale: Tensor | float | None = None,
    out_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    relative_bias: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    kv_chunk_size: int | None = None,
) -> PagedCall[Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The exact semantics are those of `torch_core.reference.paged_attention`. Keys and values of the new tokens must be
    in the cache already. The mask is aligned bottom-right. Table entries after the last block of a sequence and slots
    that no row sees may hold anything. A row's result does not depend on the other sequences.

    Args:
        query: float32, bfloat16 or float16 `[num_tokens, num_heads, head_size]`; rows at and after
            `query_start_loc[-1]` are padding. fp8 with `q_scale`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, or a pair of a key cache
            `[num_blocks, block_size, num_kv_heads, head_size]` and a value cache. Only read.
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`, tokens in the cache; 0 for a padding row.
        query_start_loc: int32 `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: an upper bound on the query lengths; it never changes a result.
        out: like the result, written in place and returned; None makes one.
        k_scale: stored key * k_scale = real key; a number or a one-element float32 tensor; None for 1.
        v_scale: the same for values.
        q_scale: the same for an fp8 query.
        out_scale: scale of an fp8 `out`, which then holds `result / out_scale`, saturated.
        k_scale_cache: float32 `[num_blocks, block_size, num_kv_heads]`, a scale per token and head.
        v_scale_cache: the same for values.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`, a logit without a value in every softmax; the lse includes it.
        mm_prefix_range: int32 `[num_seqs, ranges, 2]`, spans of bidirectional attention.
        relative_bias: float `[num_heads, 2 * D + 1]`, added by the distance `clip(key - query, -D, D)`.
        qq_bias: float `[rows, rows]`, added to the scores between new tokens.
        seq_causal: bool `[num_seqs]`, overrides `spec.causal`.
        kv_chunk_size: keys of one chunk of the split kernel; see `PagedCall`.

    Returns:
        The output `[num_tokens, num_heads, value_head_size]` in the query's dtype (bfloat16 for fp8); the functions
        with "lse" in their name also return the natural log-sum-exp, float32 `[num_tokens, num_heads]`. Rows that see
        no key, padding rows too, give zeros and -inf.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit; on the CPU also lengths and block ids out of
            range (on CUDA those values live on the device and are not looked at).
        Unsupported: tensors that require a gradient; a device or a combination without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 2, 4, 1, 2)
        >>> cache[1, 1, :3] = 5.0
        >>> block_tables, seq_lens, query_start_loc = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([[1]], [3], [0, 1]))
        >>> out, lse = paged_attention_with_lse(torch.ones(1, 1, 2), cache, block_tables, seq_lens, query_start_loc,
        ...                                     spec=AttentionSpec(scale=1.0), max_query_len=1)
        >>> out.round(decimals=4).tolist(), round(lse.exp().item(), 4)
        ([[[5.0, 5.0]]], 3.0)
    """
    return PagedCall(
        query=query,
        **cache_fields(kv_cache),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        spec=spec,
        max_query_len=max_query_len,
        out=out,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        out_scale=out_scale,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        mm_prefix_range=mm_prefix_range,
        relative_bias=relative_bias,
        qq_bias=qq_bias,
        seq_causal=seq_causal,
        kv_chunk_size=kv_chunk_size,
    )


def dense_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int,
    max_key_len: int | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    relative_bias: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_seeds: Tensor | None = None,
    deterministic: bool = True,
) -> DenseCall[Tensor]:
    """Attends packed sequences of unequal length: encoders, cross attention, prefill without a cache.

    The exact semantics are those of `torch_core.reference.attention`. Keys need not be as many as queries; the mask is
    aligned bottom-right.

    Args:
        query: float32, bfloat16 or float16 `[num_tokens, num_heads, head_size]`.
        key: `[num_keys, num_kv_heads, head_size]`.
        value: `[num_keys, num_kv_heads, value_head_size]`.
        query_start_loc: int32 `[num_seqs + 1]`.
        key_start_loc: int32 `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: an upper bound on the query lengths; it never changes a result.
        max_key_len: the same for the key lengths; None for any.
        out: like the result, written in place and returned; None makes one.
        out_scale: scale of an fp8 `out`, which then holds `result / out_scale`, saturated.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`, a logit without a value in every softmax; the lse includes it.
        mm_prefix_range: int32 `[num_seqs, ranges, 2]`, spans of bidirectional attention.
        relative_bias: float `[num_heads, 2 * D + 1]`, added by the distance `clip(key - query, -D, D)`.
        qq_bias: float `[rows, rows]`, added to the scores between queries and the last keys.
        seq_causal: bool `[num_seqs]`, overrides `spec.causal`.
        dropout_rate: share of dropped softmax weights; the others are divided by 1 - dropout_rate.
        dropout_seeds: int32 `[num_seqs, num_heads, 2]`, any numbers; see `torch_core.attention.dropout`.
        deterministic: `attention_backward` gives the same bits every time; without it, some kernels are faster.

    Returns:
        The output, and the log-sum-exp if it is asked for; see `paged_attention`.

    Raises:
        InvalidInput: as `paged_attention`.
        Unsupported: as `paged_attention`.
    """
    return DenseCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        spec=spec,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        out=out,
        out_scale=out_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        mm_prefix_range=mm_prefix_range,
        relative_bias=relative_bias,
        qq_bias=qq_bias,
        seq_causal=seq_causal,
        dropout_rate=dropout_rate,
        dropout_seeds=dropout_seeds,
        deterministic=deterministic,
    )


def attention_backward(
    *args: Any, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """Differentiates `attention`; see `torch_core.attention.backward_call.DenseBackwardCall`.

    Args:
        *args: the arrays that `attention` was given.
        out: its result.
        lse: log-sum-exp of `attention_with_lse`.
        d_out: the gradient of the result.
        d_lse: the gradient of the log-sum-exp; None for none.
        **options: the options that `attention` was given, without `out`.

    Returns:
        d_query, d_key and d_value, and d_alibi_slopes and d_sinks as far as those are given; in their dtypes.

    Raises:
        InvalidInput: as `attention`; out, lse and their gradients do not go together.
        Unsupported: as `attention`; a bias that has a derivative.

    Example:
        >>> import torch
        >>> query, value, starts = torch.zeros(1, 1, 2), torch.ones(2, 1, 2), torch.tensor([0, 1]).int()
        >>> given = (query, value, value, starts, torch.tensor([0, 2]).int())
        >>> options = {"spec": AttentionSpec(scale=1.0), "max_query_len": 1}
        >>> out, lse = attention_with_lse(*given, **options)
        >>> attention_backward(*given, **options, out=out, lse=lse, d_out=torch.ones(1, 1, 2))["d_value"].tolist()
        [[[0.5, 0.5]], [[0.5, 0.5]]]
    """
    return run(backward_of(dense_call(*args, **options), out=out, lse=lse, d_out=d_out, d_lse=d_lse))


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    num_tokens_a: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges two attention results over disjoint sets of keys into the result over their union.

    The exact semantics are those of `torch_core.reference.merge_states`: a state with lse -inf (or +inf) is empty and
    its output is not read; two empty states give zeros and -inf.

    Args:
        out_a: `[num_tokens, num_heads, head_size]`.
        lse_a: float32 `[num_tokens, num_heads]`, natural logarithm.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: like the merged output, written and returned; it may be `out_a` or `out_b`. None makes one.
        lse: the same for the merged lse.
        out_scale: scale of an fp8 `out`, which then holds `result / out_scale`, saturated.
        out_dtype: dtype of a new output; that of `out_a` when None.
        num_tokens_a: tokens from this one on have no first state.

    Returns:
        The merged output and the merged lse.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit.
        Unsupported: a device without an implementation.

    Example:
        >>> import torch
        >>> one, two, lse = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.zeros(1, 1)
        >>> merge_states(one, lse, two, lse)[0].item()
        1.5
    """
    results = run(
        MergeCall(
            out_a=out_a,
            lse_a=lse_a,
            out_b=out_b,
            lse_b=lse_b,
            out=out,
            lse=lse,
            out_scale=out_scale,
            out_dtype=None if out_dtype is None else dtype_name(out_dtype),
            num_tokens_a=num_tokens_a,
        )
    )
    return results["out"], results["lse"]


def cascade_attention(call: PagedCall[Tensor], prefix: SharedPrefix[Tensor]) -> dict[str, Tensor]:
    """Computes the result of `run(call)`, within rounding; see `torch_core.attention.cascade.cascade_attention`."""
    return cascade.cascade_attention(call, prefix, run)


def output_of(make_call: Callable[_P, AttentionCall[Tensor]], name: str) -> Callable[_P, Tensor]:
    """Returns the operation of that name which makes a call, runs it and returns its output."""

    @functools.wraps(make_call)
    def attend(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return run(call_named(name, make_call, *args, **kwargs))["out"]

    attend.__name__ = attend.__qualname__ = name
    return attend


def output_and_lse_of(make_call: Callable[_P, AttentionCall[Tensor]], name: str) -> Callable[_P, tuple[Tensor, Tensor]]:
    """Returns the operation of that name which makes a call, runs it and returns its output and lse."""

    @functools.wraps(make_call)
    def attend(*args: _P.args, **kwargs: _P.kwargs) -> tuple[Tensor, Tensor]:
        results = run(replace(call_named(name, make_call, *args, **kwargs), with_lse=True))
        return results["out"], results["lse"]

    attend.__name__ = attend.__qualname__ = name
    return attend


# One list of keywords for each operation: the functions differ in their results.
paged_attention = output_of(paged_call, "paged_attention")
paged_attention_with_lse = output_and_lse_of(paged_call, "paged_attention_with_lse")
attention = output_of(dense_call, "attention")
attention_with_lse = output_and_lse_of(dense_call, "attention_with_lse")
