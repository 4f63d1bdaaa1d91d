"""Attention on torch tensors by keywords: each function makes a call and runs it where its tensors are.

Keywords and their meanings: `torch_core.attention.options`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from torch_core.attention import cascade
from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import AttentionCall, DenseCall, PagedCall
from torch_core.attention.cascade import SharedPrefix
from torch_core.attention.checks import cache_fields
from torch_core.attention.merge_call import MergeCall
from torch_core.attention.options import DenseOptions, PagedOptions
from torch_core.launch.public import documented, operation
from torch_core.launch.run import run
from torch_core.launch.tensors import dtype_name


@documented(PagedCall, "Tensor")
def paged_call(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    out: Tensor | None = None,
    out_dtype: str | None = None,
    **options: Unpack[PagedOptions[Tensor]],
) -> PagedCall[Tensor]:
    """Attends any mix of prefill, chunked prefill, speculative and decode rows over a paged cache.

    The exact semantics are those of `torch_core.reference.paged_attention`. Keys and values of the new tokens must be
    in the cache already. The mask is aligned bottom-right. Table entries after the last block of a sequence and slots
    that no row sees may hold anything. A row's result does not depend on the other sequences.

    Returns:
        The output `[num_tokens, num_heads, value_head_size]` in the query's dtype (bfloat16 for fp8); the functions
        with "lse" in their name also return the natural log-sum-exp, float32 `[num_tokens, num_heads]`. Rows that see
        no key, padding rows too, give zeros and -inf.

    Raises:
        InvalidInput: ranks, shapes, dtypes or devices that do not fit; on the CPU also lengths and block ids out of
            range (on CUDA those values are on the device and are not checked).
        Unsupported: tensors that require a gradient; a device or a combination without an implementation.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 2, 4, 1, 2)
        >>> cache[1, 1, :3] = 5.0
        >>> block_tables, seq_lens, query_start_loc = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([[1]], [3], [0, 1]))
        >>> out, lse = paged_attention_with_lse(torch.ones(1, 1, 2), cache, block_tables, seq_lens, query_start_loc,
        ...                                     scale=1.0, max_query_len=1)
        >>> out.round(decimals=4).tolist(), round(lse.exp().item(), 4)
        ([[[5.0, 5.0]]], 3.0)
    """
    return PagedCall(
        query=query,
        **cache_fields(kv_cache),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        out=out,
        out_dtype=out_dtype,
        **options,
    )


@documented(DenseCall, "Tensor")
def dense_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    max_query_len: int,
    max_key_len: int | None = None,
    out: Tensor | None = None,
    out_dtype: str | None = None,
    **options: Unpack[DenseOptions[Tensor]],
) -> DenseCall[Tensor]:
    """Attends packed sequences of unequal length: encoders, cross attention, prefill without a cache.

    The exact semantics are those of `torch_core.reference.attention`. Keys need not be as many as queries; the mask is
    aligned bottom-right.

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
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        out=out,
        out_dtype=out_dtype,
        **options,
    )


@documented(DenseBackwardCall, "Tensor")
def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    max_query_len: int,
    max_key_len: int | None = None,
    **options: Unpack[DenseOptions[Tensor]],
) -> dict[str, Tensor]:
    """Differentiates `attention`; see `torch_core.attention.backward_call.DenseBackwardCall`.

    Args:
        out: the result of `attention_with_lse` for the same arguments.

    Returns:
        d_query, d_key and d_value, and d_alibi_slopes and d_sinks as far as those are given; in their dtypes.

    Raises:
        InvalidInput: as `attention`; out, lse and their gradients do not go together.
        Unsupported: as `attention`; a bias that has a derivative.

    Example:
        >>> import torch
        >>> query, value, starts = torch.zeros(1, 1, 2), torch.ones(2, 1, 2), torch.tensor([0, 1]).int()
        >>> given = (query, value, value, starts, torch.tensor([0, 2]).int())
        >>> options = {"scale": 1.0, "max_query_len": 1}
        >>> out, lse = attention_with_lse(*given, **options)
        >>> attention_backward(*given, **options, out=out, lse=lse, d_out=torch.ones(1, 1, 2))["d_value"].tolist()
        [[[0.5, 0.5]], [[0.5, 0.5]]]
    """
    call = DenseCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        **options,
    )
    return run(backward_of(call, out=out, lse=lse, d_out=d_out, d_lse=d_lse))


@documented(MergeCall, "Tensor")
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

    Returns:
        The merged output and the merged lse.

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


def output(call: AttentionCall[Tensor]) -> Tensor:
    """Runs a call and returns its output."""
    return run(call)["out"]


def output_and_lse(call: AttentionCall[Tensor]) -> tuple[Tensor, Tensor]:
    """Runs a call and returns its output and lse."""
    results = run(replace(call, with_lse=True))
    return results["out"], results["lse"]


# One list of keywords for each operation: the functions differ in their results.
paged_attention = operation(paged_call, output, "paged_attention", returns="Tensor")
paged_attention_with_lse = operation(
    paged_call, output_and_lse, "paged_attention_with_lse", returns="tuple[Tensor, Tensor]"
)
attention = operation(dense_call, output, "attention", returns="Tensor")
attention_with_lse = operation(dense_call, output_and_lse, "attention_with_lse", returns="tuple[Tensor, Tensor]")
