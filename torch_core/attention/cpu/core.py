"""Softmax attention over gathered keys and values: one fused torch call if it can be, plain matmuls if not."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

#: float32 elements of 16 bytes. Without MKL_CBWR, MKL on some processors rounds products of few rows in another order
#: if an operand is not aligned to this number of bytes; multiples of it make no difference.
_ALIGNED = 4
#: Rows and keys that the fused kernel takes at a time, of few rows.
_ROWS_AT_A_TIME, _KEYS_AT_A_TIME = 32, 512

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
    dropout: Tensor | None = None,
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
        dropout: float32, factors of the softmax weights, likewise; or None.
        is_causal: row i sees keys 0 to i; only with as many rows as keys and without `bias`.

    Returns:
        Output `[batch, heads, rows, value_head_size]` and natural-log lse `[batch, heads, rows]`, both float32.
    """
    if scale < 0:
        # The fused kernel masks before it scales: -inf would become inf.
        query, scale = -query, -scale
    if query.shape[-1] % _ALIGNED:
        query = query.clone()
    if dropout is None and fused_applies(logits_soft_cap, query.shape[-1], value.shape[-1]):
        return _attend_fused(query, key, value, scale, bias, is_causal)
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
    if dropout is not None:
        scores *= dropout
    return torch.matmul(scores, value).div_(total), total.log_().add_(highest).squeeze(-1)


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, head_size = query.shape
    # The kernel's threads share one buffer, in parts of this number of elements per row. Rows are added until all parts
    # and all items of the query have equal alignment; otherwise a row's bits would depend on its thread.
    per_row = min(key.shape[2], _KEYS_AT_A_TIME) + 2 + head_size
    missing_rows = -rows % (_ALIGNED // math.gcd(_ALIGNED, per_row, head_size))
    if missing_rows and rows < _ROWS_AT_A_TIME:
        query = pad(query, (0, 0, 0, missing_rows))
        if bias is not None and bias.shape[2] > 1:
            bias = pad(bias, (0, 0, 0, missing_rows))
    if batch * heads == 1:
        # A single (batch, head) item is not spread over threads, and the matrix library inside then starts threads of
        # its own and rounds differently than for the same item in a larger batch. Two equal items cost nothing where
        # there are two threads, and keep the result independent of the batch.
        query, key, value = (x.expand(2, *x.shape[1:]) for x in (query, key, value))
    output, lse = _flash_attention(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
    return output[:batch, :, :rows], lse[:batch, :, :rows]
