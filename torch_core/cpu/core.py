"""Softmax attention over gathered keys and values: one fused torch call where it can be, plain matmuls where not."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "fused_applies"]

# F.scaled_dot_product_attention calls the same kernel but does not return the lse.
_flash_attention = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]


def fused_applies(logits_soft_cap: float | None, head_size: int, value_head_size: int) -> bool:
    """Whether `attend` takes torch's fused CPU kernel, whose result for one batch entry depends on that entry only."""
    return logits_soft_cap is None and head_size == value_head_size


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attends float32 tensors; every row must see a key, and hidden keys and values must be finite.

    Args:
        query: `[batch, heads, rows, head_size]`, last axis contiguous, as in `key` and `value`.
        key: `[batch, heads, keys, head_size]`; a broadcast (stride 0) axis is fine.
        value: `[batch, heads, keys, value_head_size]`.
        scale: factor on the scores.
        logits_soft_cap: cap on the scores, or None.
        bias: float32, broadcastable to `[batch, heads, rows, keys]`, added after the cap; -inf hides. Or None.
        is_causal: row i sees keys 0 to i; only with as many rows as keys and without `bias`.

    Returns:
        Output `[batch, heads, rows, value_head_size]` and natural-log lse `[batch, heads, rows]`, both float32.
    """
    if scale < 0:
        # The fused kernel masks before it scales: -inf would become inf.
        query, scale = -query, -scale
    if fused_applies(logits_soft_cap, query.shape[-1], value.shape[-1]):
        if query.shape[0] * query.shape[1] == 1:
            # A single (batch, head) item is not spread over threads, and the matrix library inside then starts
            # threads of its own and rounds differently than for the same item in a larger batch. Two equal items
            # cost nothing where there are two threads, and keep the result independent of the batch.
            query, key, value = (x.expand(2, *x.shape[1:]) for x in (query, key, value))
            output, lse = _flash_attention(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
            return output[:1], lse[:1]
        return _flash_attention(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
    scores = torch.matmul(query, key.transpose(-1, -2))
    if logits_soft_cap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / logits_soft_cap).tanh_().mul_(logits_soft_cap)
    if bias is not None:
        scores += bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
    return torch.matmul(scores, value).div_(total), total.log_().add_(highest).squeeze(-1)
