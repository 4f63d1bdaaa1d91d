"""Paged attention for CPU tensors: splits a batch into groups of decode rows and single longer sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.launch.cpu.core import fused_applies
from torch_core.launch.cpu.decode import decode_group, first_key_of_decode, padded_blocks
from torch_core.launch.cpu.gather import CachePair, gather_blocks, scale_value
from torch_core.launch.cpu.masks import Extras, key_range
from torch_core.launch.cpu.result import finish
from torch_core.launch.cpu.rows import attend_rows
from torch_core.specs import AttentionSpec

__all__ = ["paged_attention", "paged_attention_with_lse"]

#: Keys of all sequences of one decode group, times heads and head size: 512K float32 are 2 MiB for keys alone.
_MAX_GROUP_ELEMENTS = 1 << 19


def paged_attention(query: Tensor, kv_cache: CachePair, *args, **kwargs) -> Tensor:
    """Returns only the output of `paged_attention_with_lse`, whose arguments it takes."""
    return _paged_attention(query, kv_cache, *args, **kwargs)[0]


def paged_attention_with_lse(query: Tensor, kv_cache: CachePair, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """Attends any mix of decode, speculative and prefill rows over a paged cache; see `torch_core.launch`.

    Nothing is checked. The arithmetic is float32 for every dtype. Memory: the keys and values of one sequence, or of
    a bounded group of decode rows, in float32, and masks of at most 16 MiB.
    """
    output, lse = _paged_attention(query, kv_cache, *args, **kwargs)
    return output, lse.contiguous()


def _paged_attention(
    query: Tensor,
    kv_cache: CachePair,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    spec: AttentionSpec,
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
) -> tuple[Tensor, Tensor]:
    if isinstance(kv_cache, Tensor):
        _, _, block_size, num_kv_heads, value_head_size = kv_cache.shape
    else:
        _, block_size, num_kv_heads, value_head_size = kv_cache[1].shape
    num_tokens, num_heads, head_size = query.shape
    query_dtype = query.dtype
    if query.dtype is not torch.float32:
        query = query.float()
    query = query.contiguous()
    lens = seq_lens.tolist()
    starts = query_start_loc.tolist()
    tables = block_tables.numpy()
    slopes = None if alibi_slopes is None else alibi_slopes.float().numpy()
    scale = spec.scale * scale_value(k_scale) * scale_value(q_scale)
    scale_caches = None
    if k_scale_cache is not None and v_scale_cache is not None:
        scale_caches = (k_scale_cache, v_scale_cache)

    groupable = (
        mm_prefix_range is None
        and qq_bias is None
        and seq_causal is None
        and fused_applies(spec.logits_soft_cap, head_size, value_head_size)
    )
    groups: dict[int, list[tuple[int, int, int]]] = {}
    single: list[int] = []
    for seq, seq_len in enumerate(lens):
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0 or seq_len == 0:
            continue
        if query_len == 1 and groupable:
            first_key = first_key_of_decode(seq_len, spec)
            keys = seq_len - first_key // block_size * block_size
            groups.setdefault(padded_blocks(keys, block_size), []).append((seq, first_key, seq_len))
        else:
            single.append(seq)

    parts = []
    for num_blocks, members in groups.items():
        limit = max(1, _MAX_GROUP_ELEMENTS // (num_blocks * block_size * num_kv_heads * head_size))
        for at in range(0, len(members), limit):
            part = members[at : at + limit]
            rows = _rows([starts[seq] for seq, _, _ in part], num_tokens)
            part_output, part_lse = decode_group(
                query if rows is None else query[rows],
                kv_cache,
                tables,
                part,
                num_blocks,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                scale=scale,
                spec=spec,
                alibi_slopes=slopes,
                scale_caches=scale_caches,
            )
            parts.append((rows, part_output.reshape(-1, num_heads, value_head_size), part_lse))
    if len(parts) == 1 and parts[0][0] is None:
        output, lse = parts[0][1], parts[0][2].reshape(-1, num_heads)
    else:
        output = torch.zeros(num_tokens, num_heads, value_head_size)
        lse = torch.full((num_tokens, num_heads), -torch.inf)
        for rows, part_output, part_lse in parts:
            output[rows] = part_output
            lse[rows] = part_lse.reshape(-1, num_heads)

    bias = None if qq_bias is None else qq_bias.float().numpy()
    for seq in single:
        rows = slice(starts[seq], starts[seq + 1])
        extras = Extras(
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            mm_ranges=None if mm_prefix_range is None else mm_prefix_range[seq].numpy(),
            qq_bias=bias,
            alibi_slopes=slopes,
        )
        seq_len, first_key = lens[seq], 0
        if mm_prefix_range is None:
            context_len = seq_len - (rows.stop - rows.start)
            first_key = key_range(context_len, seq_len - 1, seq_len, extras.is_causal(spec), spec)[0]
        first_block = first_key // block_size
        blocks = tables[seq : seq + 1, first_block : -(-seq_len // block_size)].astype(np.int64)
        live = (first_key - first_block * block_size, seq_len - first_block * block_size)
        key, value = gather_blocks(kv_cache, blocks, [live], scale_caches)
        attend_rows(
            query[rows],
            key[0, :, live[0] : live[1]],
            value[0, :, live[0] : live[1]],
            output[rows],
            lse[rows],
            first_key=first_key,
            key_len=seq_len,
            scale=scale,
            spec=spec,
            extras=extras,
        )
    return finish(output, lse, query_dtype=query_dtype, out=out, sinks=sinks, v_scale=v_scale, out_scale=out_scale)


def _rows(tokens: list[int], num_tokens: int) -> slice | Tensor | None:
    """Returns increasing token indices as None when they are all, a slice when they are consecutive: no copy then."""
    if len(tokens) == num_tokens:
        return None
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens)
