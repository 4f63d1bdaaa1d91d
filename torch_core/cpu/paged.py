"""Paged attention for CPU tensors: splits a batch into groups of decode rows and single longer sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_core.cpu.core import fused_applies
from torch_core.cpu.decode import decode_group, first_key_of_decode, padded_blocks
from torch_core.cpu.gather import CachePair, gather_blocks, raw_array, scale_value
from torch_core.cpu.masks import Extras, key_range
from torch_core.cpu.result import open_results
from torch_core.cpu.rows import attend_rows
from torch_core.specs import AttentionSpec

__all__ = ["paged_attention", "paged_attention_with_lse"]

#: Keys of all sequences of one decode group, times heads and head size: 512K float32 are 2 MiB for keys alone.
_MAX_GROUP_ELEMENTS = 1 << 19


def paged_attention(
    query: Tensor,
    kv_cache: CachePair,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    **options: Any,
) -> Tensor:
    """Returns only the output of `paged_attention_with_lse`, whose arguments it takes, and computes no lse."""
    return _paged_attention(query, kv_cache, block_tables, seq_lens, query_start_loc, spec, False, **options)[0]


def paged_attention_with_lse(
    query: Tensor,
    kv_cache: CachePair,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attends any mix of decode, speculative and prefill rows over a paged cache; see `torch_core.run`.

    Nothing is checked. The arithmetic is float32 for every dtype. Memory: the keys and values of one sequence, or of
    a bounded group of decode rows, in float32, and masks of at most 16 MiB.
    """
    output, lse = _paged_attention(query, kv_cache, block_tables, seq_lens, query_start_loc, spec, True, **options)
    return output, lse


def _paged_attention(
    query: Tensor,
    kv_cache: CachePair,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    spec: AttentionSpec,
    with_lse: bool,
    *,
    max_query_len: int | None = None,
    out: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    qq_bias: Tensor | None = None,
    seq_causal: Tensor | None = None,
    out_scale: Tensor | float | None = None,
) -> tuple[Tensor, Any]:
    if isinstance(kv_cache, Tensor):
        _, _, block_size, num_kv_heads, value_head_size = kv_cache.shape
    else:
        _, block_size, num_kv_heads, value_head_size = kv_cache[1].shape
    num_tokens, _, head_size = query.shape
    starts = query_start_loc.tolist()
    lens = seq_lens.tolist()
    groupable = (
        mm_prefix_range is None
        and qq_bias is None
        and seq_causal is None
        and fused_applies(spec.logits_soft_cap, head_size, value_head_size)
    )
    groups: dict[int, list[tuple[int, int, int]]] = {}
    single: list[int] = []
    num_stored = 0
    for seq, seq_len in enumerate(lens):
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0 or seq_len == 0:
            continue
        num_stored += query_len
        if query_len == 1 and groupable:
            first_key = first_key_of_decode(seq_len, spec)
            keys = seq_len - first_key // block_size * block_size
            groups.setdefault(padded_blocks(keys, block_size), []).append((seq, first_key, seq_len))
        else:
            single.append(seq)

    out, lse, results = open_results(
        query,
        num_kv_heads,
        value_head_size,
        num_stored=num_stored,
        with_lse=with_lse,
        out=out,
        sinks=sinks,
        v_scale=v_scale,
        out_scale=out_scale,
    )
    query = _as_heads(query, num_kv_heads)
    tables = block_tables.numpy()
    slopes = None if alibi_slopes is None else raw_array(alibi_slopes.float())
    scale = spec.scale * scale_value(k_scale) * scale_value(q_scale)
    scale_caches = None
    if k_scale_cache is not None and v_scale_cache is not None:
        scale_caches = (k_scale_cache, v_scale_cache)
    for num_blocks, members in groups.items():
        limit = max(1, _MAX_GROUP_ELEMENTS // (num_blocks * block_size * num_kv_heads * head_size))
        for at in range(0, len(members), limit):
            part = members[at : at + limit]
            rows = _rows([starts[member[0]] for member in part], num_tokens)
            part_query = query if rows is None else query[rows]
            results.store(
                rows,
                *decode_group(
                    part_query, kv_cache, tables, part, num_blocks, block_size, scale, spec, slopes, scale_caches
                ),
            )

    bias = None if qq_bias is None else raw_array(qq_bias.float())
    for seq in single:
        extras = Extras(
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            mm_ranges=None if mm_prefix_range is None else mm_prefix_range[seq].numpy(),
            qq_bias=bias,
            alibi_slopes=slopes,
        )
        seq_len, first_key = lens[seq], 0
        if mm_prefix_range is None:
            context_len = seq_len - starts[seq + 1] + starts[seq]
            first_key = key_range(context_len, seq_len - 1, seq_len, extras.is_causal(spec), spec)[0]
        first_block = first_key // block_size
        blocks = tables[seq : seq + 1, first_block : -(-seq_len // block_size)].astype(np.int64)
        live = (first_key - first_block * block_size, seq_len - first_block * block_size)
        key, value = gather_blocks(kv_cache, blocks, [live], scale_caches)
        rows = slice(starts[seq], starts[seq + 1])
        results.store(
            rows,
            *attend_rows(
                query[rows],
                key[0, :, live[0] : live[1]],
                value[0, :, live[0] : live[1]],
                first_key=first_key,
                key_len=seq_len,
                scale=scale,
                spec=spec,
                extras=extras,
            ),
        )
    return out, lse


def _as_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Returns float32 `[num_tokens, num_kv_heads, group_size, head_size]` with a contiguous last axis."""
    num_tokens, num_heads, head_size = query.shape
    if query.dtype is not torch.float32:
        query = query.float()
    if query.stride(2) != 1:
        query = query.contiguous()
    return query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)


def _rows(tokens: list[int], num_tokens: int) -> slice | Tensor | None:
    """Returns increasing token indices as None when they are all, a slice when they are consecutive: no copy then."""
    if len(tokens) == num_tokens:
        return None
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens)
