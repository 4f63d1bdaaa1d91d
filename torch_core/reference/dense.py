"""Attention over keys and values that lie packed in memory: encoders, cross attention, prefill without a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.errors import InvalidInput
from torch_core.reference.sequence import attend_sequence, empty_results, start_offsets, store_output
from torch_core.specs import AttentionSpec

__all__ = ["attention", "attention_with_lse"]


def attention(query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> Tensor:
    """Returns only the output of `attention_with_lse`, whose arguments it takes."""
    return attention_with_lse(query, key, value, *args, **kwargs)[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    max_query_len: int | None = None,
    max_key_len: int | None = None,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    out_scale: Tensor | float | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends sequences of unequal length that are packed one after the other.

    Sequence `s` owns query rows `query_start_loc[s]:query_start_loc[s + 1]` and key rows
    `key_start_loc[s]:key_start_loc[s + 1]`. The two lengths may differ (cross attention, a query against a longer
    past); the mask is aligned bottom-right, as in `AttentionSpec`.

    Args:
        query: `[num_tokens, num_heads, head_size]`; rows at and after `query_start_loc[-1]` are padding.
        key: `[num_keys, num_kv_heads, head_size]`.
        value: `[num_keys, num_kv_heads, value_head_size]`.
        query_start_loc: int `[num_seqs + 1]`.
        key_start_loc: int `[num_seqs + 1]`.
        spec: the static options.
        max_query_len: checked against the query lengths when given; it never changes a result.
        max_key_len: the same for the key lengths.
        out: `[num_tokens, num_heads, value_head_size]`, written in place and returned; None makes one.
        alibi_slopes: float `[num_heads]`.
        sinks: float `[num_heads]`: a logit without a value in every softmax.
        mm_prefix_range: int `[num_seqs, ranges, 2]`; see `visible_keys`.
        qq_bias: float `[rows, rows]`; see `score_bias`.
        seq_causal: bool `[num_seqs]`, overrides `spec.causal` sequence by sequence.
        out_scale: for an fp8 `out`, which then holds `result / out_scale`, saturated.
        compute_dtype: the dtype of the arithmetic and of the output. None computes in float32 (float64 for float64
            inputs) and returns the query's dtype.

    Returns:
        The output and the lse; padding rows give zeros and -inf. See `attend_sequence`.

    Raises:
        InvalidInput: offsets that fall, that do not start at 0, or that exceed their tensor or the stated maximum.

    Example:
        >>> x = torch.ones(3, 1, 2)
        >>> starts = torch.tensor([0, 3])
        >>> attention(x, x, x, starts, starts, spec=AttentionSpec(scale=0.5)).round(decimals=4).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    query_starts = start_offsets("query_start_loc", query_start_loc, query.shape[0], max_query_len)
    key_starts = start_offsets("key_start_loc", key_start_loc, key.shape[0], max_key_len)
    if len(query_starts) != len(key_starts):
        raise InvalidInput(
            f"key_start_loc has {len(key_starts)} entries and query_start_loc {len(query_starts)}; "
            "both need num_seqs + 1."
        )
    output, lse, compute_dtype = empty_results(query, value.shape[-1], compute_dtype)
    for seq in range(len(query_starts) - 1):
        rows = slice(query_starts[seq], query_starts[seq + 1])
        keys = slice(key_starts[seq], key_starts[seq + 1])
        output[rows], lse[rows] = attend_sequence(
            query[rows].cpu().to(compute_dtype),
            key[keys].cpu().to(compute_dtype),
            value[keys].cpu().to(compute_dtype),
            spec=spec,
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            mm_prefix_range=None if mm_prefix_range is None else mm_prefix_range[seq],
            qq_bias=qq_bias,
        )
    return store_output(output, out, out_scale, query.device), lse.to(query.device)
