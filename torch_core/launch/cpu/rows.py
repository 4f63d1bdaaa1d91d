"""Attention of one sequence's query rows over its keys and values, in bounded pieces: prefill and odd cases."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.launch.cpu.core import attend, fused_applies
from torch_core.launch.cpu.masks import Extras, additive_mask, first_row_with_keys, key_range
from torch_core.specs import AttentionSpec

__all__ = ["attend_rows"]

#: Elements of one mask or score matrix: 4M float32 are 16 MiB.
_MAX_SCORE_ELEMENTS = 1 << 22


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    first_key: int,
    key_len: int,
    scale: float,
    spec: AttentionSpec,
    extras: Extras,
) -> None:
    """Computes one sequence into `output` and `lse`, which must hold zeros and -inf.

    Args:
        query: float32 `[query_len, num_heads, head_size]`.
        key: float32 `[num_kv_heads, key_len - first_key, head_size]`.
        value: float32 `[num_kv_heads, key_len - first_key, value_head_size]`.
        output: float32 `[query_len, num_heads, value_head_size]`, written.
        lse: float32 `[query_len, num_heads]`, written.
        first_key: the keys before it were left out because no row sees them.
        key_len: keys of the sequence, those left out included.
        scale: factor on the scores, every other scale included.
        spec: the static options but for the scale.
        extras: what this sequence adds.
    """
    query_len, num_heads, head_size = query.shape
    num_kv_heads, _, value_head_size = value.shape
    group_size = num_heads // num_kv_heads
    causal = extras.is_causal(spec)
    context_len = key_len - query_len
    heads = (num_kv_heads, group_size)
    query = query.view(query_len, *heads, head_size).permute(1, 2, 0, 3)
    key = key[:, None].expand(*heads, -1, head_size)
    value = value[:, None].expand(*heads, -1, value_head_size)
    output = output.view(query_len, *heads, value_head_size).permute(1, 2, 0, 3)
    lse = lse.view(query_len, *heads).permute(1, 2, 0)

    irregular = extras.mm_ranges is not None or extras.qq_bias is not None
    row = 0 if irregular else first_row_with_keys(query_len, key_len, causal, spec)
    fused = fused_applies(spec.logits_soft_cap, head_size, value_head_size)
    unmasked = not irregular and extras.alibi_slopes is None and _sees_everything(row, query_len, key_len, causal, spec)
    square = unmasked and causal and query_len - row == key_len
    per_row = key_len * (1 if fused and extras.alibi_slopes is None else num_heads)
    step = max(1, min(query_len, _MAX_SCORE_ELEMENTS // max(1, per_row)))
    if fused and unmasked and (square or not causal):
        step = max(1, query_len)
    for start in range(row, query_len, step):
        rows = slice(start, min(start + step, query_len))
        positions = (context_len + rows.start, context_len + rows.stop)
        keys = (0, key_len) if irregular else key_range(positions[0], positions[1] - 1, key_len, causal, spec)
        keys = (max(keys[0], first_key), keys[1])
        part = slice(keys[0] - first_key, keys[1] - first_key)
        is_causal = square and step == query_len
        part_key, part_value, bias, seen = key[:, :, part], value[:, :, part], None, None
        if not is_causal and (not unmasked or causal):
            mask = additive_mask(positions, keys, context_len, spec, extras)
            if irregular:
                visible = mask[0] > -np.inf
                seen = torch.from_numpy(visible.any(axis=1))
                unseen = torch.from_numpy(~visible.any(axis=0))[:, None]
                part_key, part_value = part_key.masked_fill(unseen, 0), part_value.masked_fill(unseen, 0)
            bias = torch.from_numpy(mask)
            bias = bias.view(*heads, *mask.shape[1:]) if mask.shape[0] > 1 else bias[None]
        part_output, part_lse = attend(
            query[:, :, rows],
            part_key,
            part_value,
            scale=scale,
            logits_soft_cap=spec.logits_soft_cap,
            bias=bias,
            is_causal=is_causal,
        )
        if seen is not None:
            part_lse = torch.where(seen, part_lse, -torch.inf)
            part_output = torch.where(seen[:, None], part_output, 0)
        output[:, :, rows] = part_output
        lse[:, :, rows] = part_lse


def _sees_everything(row: int, query_len: int, key_len: int, causal: bool, spec: AttentionSpec) -> bool:
    """Whether windows and chunks hide nothing from the rows from `row` on, so that the causal mask is all there is."""
    context_len = key_len - query_len
    if spec.attention_chunk is not None and spec.attention_chunk < key_len:
        return False
    if spec.window_left is not None and key_len - 1 - spec.window_left > 0:
        return False
    return causal or spec.window_right is None or context_len + row + spec.window_right >= key_len - 1
