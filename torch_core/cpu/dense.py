"""Dense attention of packed sequences for CPU tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_core.cpu.gather import raw_array
from torch_core.cpu.masks import Extras, key_range
from torch_core.cpu.result import open_results
from torch_core.cpu.rows import attend_rows
from torch_core.specs import AttentionSpec

__all__ = ["attention", "attention_with_lse"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    **options: Any,
) -> Tensor:
    """Returns only the output of `attention_with_lse`, whose arguments it takes, and computes no lse."""
    return _attention(query, key, value, query_start_loc, key_start_loc, spec, False, **options)[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attends packed sequences one by one in float32; see `torch_core.run`. Nothing is checked."""
    return _attention(query, key, value, query_start_loc, key_start_loc, spec, True, **options)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    spec: AttentionSpec,
    with_lse: bool,
    *,
    max_query_len: int | None = None,
    max_key_len: int | None = None,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    out_scale: Tensor | float | None = None,
) -> tuple[Tensor, Any]:
    num_kv_heads = key.shape[1]
    query_starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    seqs = [
        seq
        for seq in range(len(query_starts) - 1)
        if query_starts[seq + 1] > query_starts[seq] and key_starts[seq + 1] > key_starts[seq]
    ]
    out, lse, results = open_results(
        query,
        num_kv_heads,
        value.shape[-1],
        num_stored=sum(query_starts[seq + 1] - query_starts[seq] for seq in seqs),
        with_lse=with_lse,
        out=out,
        sinks=sinks,
        v_scale=None,
        out_scale=out_scale,
    )
    query, key, value = (x.float() if x.stride(2) == 1 else x.float().contiguous() for x in (query, key, value))
    query = query.unflatten(1, (num_kv_heads, -1))
    slopes = None if alibi_slopes is None else raw_array(alibi_slopes.float())
    bias = None if qq_bias is None else raw_array(qq_bias.float())
    for seq in seqs:
        extras = Extras(
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            mm_ranges=None if mm_prefix_range is None else mm_prefix_range[seq].numpy(),
            qq_bias=bias,
            alibi_slopes=slopes,
        )
        rows = slice(query_starts[seq], query_starts[seq + 1])
        first_key, key_len = 0, key_starts[seq + 1] - key_starts[seq]
        if mm_prefix_range is None:
            context_len = key_len - (rows.stop - rows.start)
            first_key = key_range(context_len, key_len - 1, key_len, extras.is_causal(spec), spec)[0]
        keys = slice(key_starts[seq] + first_key, key_starts[seq + 1])
        results.store(
            rows,
            *attend_rows(
                query[rows],
                key[keys].transpose(0, 1),
                value[keys].transpose(0, 1),
                first_key=first_key,
                key_len=key_len,
                scale=spec.scale,
                spec=spec,
                extras=extras,
            ),
        )
    return out, lse
