"""Attention of one sequence's query rows over its keys and values, in bounded pieces: prefill and odd cases."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.cpu.core import attend, fused_applies
from torch_core.attention.cpu.masks import Extras, additive_mask, first_row_with_keys, key_range
from torch_core.base.specs import AttentionSpec

#: Elements of one mask or score matrix: 4M float32 are 16 MiB.
_MAX_SCORE_ELEMENTS = 1 << 22
#: Rows of one run under a mask: short runs leave out most of the keys that a window or the causal mask hides.
_MAX_MASKED_ROWS = 128


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first_key: int,
    key_len: int,
    scale: float,
    spec: AttentionSpec,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Attends one sequence, in runs of rows whose masks or scores stay within a bound.

    Args:
        query: float32 `[query_len, num_kv_heads, group_size, head_size]`.
        key: float32 `[num_kv_heads, key_len - first_key, head_size]`.
        value: float32 `[num_kv_heads, key_len - first_key, value_head_size]`.
        first_key: the keys before it were left out because no row sees them.
        key_len: keys of the sequence, those left out included.
        scale: factor on the scores, every other scale included.
        spec: the static options but for the scale.
        extras: the additions of this sequence.

    Returns:
        float32 output `[query_len, num_kv_heads, group_size, value_head_size]` and lse without the last axis; zeros
        and -inf for rows that see no key.
    """
    query_len, *heads, head_size = query.shape
    value_head_size = value.shape[-1]
    causal = extras.is_causal(spec)
    context_len = key_len - query_len
    query = query.permute(1, 2, 0, 3)
    key = key[:, None].expand(*heads, -1, head_size)
    value = value[:, None].expand(*heads, -1, value_head_size)

    irregular = extras.irregular
    first_row = 0 if irregular else first_row_with_keys(query_len, key_len, causal, spec)
    fused = extras.dropout is None and fused_applies(spec.logits_soft_cap, head_size, value_head_size)
    plain = not irregular and extras.by_distance is None
    plain = plain and _sees_everything(first_row, query_len, key_len, causal, spec)
    if fused and plain and (not causal or query_len - first_row == key_len):
        step = query_len
    else:
        per_row = key_len * (1 if fused and extras.by_distance is None else heads[0] * heads[1])
        step = max(1, min(_MAX_MASKED_ROWS, _MAX_SCORE_ELEMENTS // per_row))
    parts = []
    for start in range(first_row, query_len, step):
        end = min(start + step, query_len)
        positions = (context_len + start, context_len + end)
        keys = (0, key_len) if irregular else key_range(positions[0], positions[1] - 1, key_len, causal, spec)
        keys = (max(keys[0], first_key), keys[1])
        near = slice(keys[0] - first_key, keys[1] - first_key)
        near_key, near_value, bias, seen = key[:, :, near], value[:, :, near], None, None
        square = plain and causal and (positions[0], positions[1]) == keys
        if not square and (not plain or (causal and end - start > 1)):
            mask = additive_mask(positions, keys, context_len, spec, extras)
            if irregular:
                visible = mask[0] > -np.inf
                seen = torch.from_numpy(visible.any(axis=1))
                unseen = torch.from_numpy(~visible.any(axis=0))[:, None]
                near_key, near_value = near_key.masked_fill(unseen, 0), near_value.masked_fill(unseen, 0)
            bias = torch.from_numpy(mask)
            bias = bias.view(*heads, *mask.shape[1:]) if mask.shape[0] > 1 else bias[None]
        dropout = extras.dropped((start, end), keys)
        output, lse = attend(
            query[:, :, start:end],
            near_key,
            near_value,
            scale=scale,
            logits_soft_cap=spec.logits_soft_cap,
            bias=bias,
            dropout=None if dropout is None else dropout.unflatten(0, tuple(heads)),
            is_causal=square,
        )
        if seen is not None:
            output, lse = torch.where(seen[:, None], output, 0), torch.where(seen, lse, -torch.inf)
        parts.append((start, end, output, lse))
    if len(parts) == 1 and first_row == 0:
        return parts[0][2].permute(2, 0, 1, 3), parts[0][3].permute(2, 0, 1)
    all_output = torch.zeros(query_len, *heads, value_head_size)
    all_lse = torch.full((query_len, *heads), -torch.inf)
    for start, end, output, lse in parts:
        all_output[start:end] = output.permute(2, 0, 1, 3)
        all_lse[start:end] = lse.permute(2, 0, 1)
    return all_output, all_lse


def _sees_everything(row: int, query_len: int, key_len: int, causal: bool, spec: AttentionSpec) -> bool:
    """Whether windows and chunks hide nothing from the rows from `row` on, so that the causal mask is all there is."""
    context_len = key_len - query_len
    if spec.attention_chunk is not None and spec.attention_chunk < key_len:
        return False
    if spec.window_left is not None and key_len - 1 - spec.window_left > 0:
        return False
    return causal or spec.window_right is None or context_len + row + spec.window_right >= key_len - 1
