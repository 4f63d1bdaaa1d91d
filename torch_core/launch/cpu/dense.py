"""Dense attention of packed sequences for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.launch.cpu.masks import Extras, key_range
from torch_core.launch.cpu.result import finish
from torch_core.launch.cpu.rows import attend_rows
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
) -> tuple[Tensor, Tensor]:
    """Attends packed sequences one by one in float32; see `torch_core.launch`. Nothing is checked."""
    num_tokens, num_heads, _ = query.shape
    query_dtype = query.dtype
    query, key, value = query.float().contiguous(), key.float(), value.float()
    output = torch.zeros(num_tokens, num_heads, value.shape[-1])
    lse = torch.full((num_tokens, num_heads), -torch.inf)
    query_starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    slopes = None if alibi_slopes is None else alibi_slopes.float().numpy()
    bias = None if qq_bias is None else qq_bias.float().numpy()
    for seq in range(len(query_starts) - 1):
        rows = slice(query_starts[seq], query_starts[seq + 1])
        key_len = key_starts[seq + 1] - key_starts[seq]
        if rows.start == rows.stop or key_len == 0:
            continue
        extras = Extras(
            causal=None if seq_causal is None else bool(seq_causal[seq]),
            mm_ranges=None if mm_prefix_range is None else mm_prefix_range[seq].numpy(),
            qq_bias=bias,
            alibi_slopes=slopes,
        )
        first_key = 0
        if mm_prefix_range is None:
            context_len = key_len - (rows.stop - rows.start)
            first_key = key_range(context_len, key_len - 1, key_len, extras.is_causal(spec), spec)[0]
        keys = slice(key_starts[seq] + first_key, key_starts[seq + 1])
        attend_rows(
            query[rows],
            key[keys].transpose(0, 1),
            value[keys].transpose(0, 1),
            output[rows],
            lse[rows],
            first_key=first_key,
            key_len=key_len,
            scale=spec.scale,
            spec=spec,
            extras=extras,
        )
    return finish(output, lse, query_dtype=query_dtype, out=out, sinks=sinks, out_scale=out_scale)
