"""Cascade attention: a prefix that all sequences share is attended once, the rest per sequence, and both are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_core import ops
from torch_core.errors import InvalidInput, Unsupported
from torch_core.specs import AttentionSpec
from torch_core.vllm.paged_metadata import PagedAttentionMetadata

__all__ = ["cascade_attention"]

_FIELDS = (
    "prefix_block_table",
    "prefix_kv_lens",
    "cu_prefix_query_lens",
    "suffix_block_table",
    "suffix_kv_lens",
)


def cascade_attention(
    query: Tensor,
    kv_cache: Tensor,
    metadata: PagedAttentionMetadata,
    *,
    spec: AttentionSpec,
    out: Tensor,
    out_scale: Tensor | None = None,
    **options: Any,
) -> None:
    """Writes to `out` what plain paged attention would, within rounding.

    All queries of the batch attend to the prefix without a mask, since every one of them stands behind it: in pieces
    (see `torch_core.metadata.prefix_piece_tokens`), so that whatever the batch, enough programs share the work. Each
    sequence attends to its own rest. Two softmaxes over disjoint keys merge by their log-sum-exp (Hydragen,
    arXiv 2402.05099; FlashInfer's cascade).

    Args:
        query: [num_tokens, num_heads, head_size].
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size].
        metadata: with the cascade fields.
        spec: causal, and without a mask that depends on the distance.
        out: like `query`; written. fp8 with `out_scale`.
        out_scale: `out` holds `result / out_scale`.
        **options: further arguments of `torch_core.ops.paged_attention_with_lse`; sinks count once.

    Raises:
        InvalidInput: the metadata has no cascade fields.
        Unsupported: windows, chunks, ALiBi or bidirectional spans.
    """
    prefix_tables, prefix_lens, prefix_queries, suffix_tables, suffix_lens = (
        _needed(getattr(metadata, name)) for name in _FIELDS
    )
    clash = {
        "a sliding window": spec.window_left is not None or spec.window_right is not None,
        "attention_chunk": spec.attention_chunk is not None,
        "ALiBi": options.get("alibi_slopes") is not None,
        "mm_prefix_range": options.get("mm_prefix_range") is not None,
    }
    for name, found in clash.items():
        if found:
            raise Unsupported(f"cascade attention does not serve {name}; build the metadata with common_prefix_len=0.")
    once = replace(spec, causal=False)
    # Sinks count once, and no key of the prefix is to the right of a query.
    for_prefix = {**options, "sinks": None, "seq_causal": None}
    prefix_out, prefix_lse = ops.paged_attention_with_lse(
        query,
        kv_cache,
        prefix_tables,
        prefix_lens,
        prefix_queries,
        spec=once,
        max_query_len=metadata.max_prefix_query_len,
        **for_prefix,
    )
    suffix_out, suffix_lse = ops.paged_attention_with_lse(
        query,
        kv_cache,
        suffix_tables,
        suffix_lens,
        metadata.query_start_loc,
        spec=spec,
        max_query_len=metadata.max_query_len,
        # Merged where it lies, unless that place is too coarse for half a result.
        out=out if out_scale is None else None,
        **options,
    )
    ops.merge_states(prefix_out, prefix_lse, suffix_out, suffix_lse, out=out, out_scale=out_scale)


def _needed(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvalidInput("the metadata has no cascade fields; build it with common_prefix_len.")
    return tensor
