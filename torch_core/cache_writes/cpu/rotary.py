"""Rotary embedding for CPU tensors, alone and with the write of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.base.specs import LARGEST_CODE
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.cpu.blocks import write_kv_cache
from torch_core.cache_writes.rotary_call import RotaryWriteCall


def rotate(heads: Tensor, cos_sin: Tensor, *, is_neox_style: bool) -> Tensor:
    """Returns `[..., size]` with its first elements rotated in float32 by `[..., rotated_dim]`, in its own dtype."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    size = cos_sin.shape[-1]
    wide = heads[..., :size].float()
    x, y = wide.chunk(2, dim=-1) if is_neox_style else wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = Tensor.new_empty(heads, heads.shape)
    first, second = (
        turned[..., :size].chunk(2, dim=-1) if is_neox_style else (turned[..., :size:2], turned[..., 1:size:2])
    )
    first.copy_(x * cos - y * sin)
    second.copy_(y * cos + x * sin)
    turned[..., size:] = heads[..., size:]
    return turned


def rotate_and_write(call: RotaryWriteCall[Tensor]) -> dict[str, Tensor]:
    """Returns the rotated queries, and stores rotated keys and values in place. Nothing but blocks is checked."""
    parts = (call.num_heads + call.num_kv_heads, call.num_kv_heads)
    heads, value = _scaled_heads(call).split(parts, dim=1)
    query, key = rotate(heads, call.cos_sin[:, None], is_neox_style=call.is_neox_style).split(
        (call.num_heads, call.num_kv_heads), dim=1
    )
    write_kv_cache(
        WriteCall(
            key=key,
            value=value,
            slot_mapping=call.slot_mapping,
            kv_cache=call.kv_cache,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )
    )
    if call.out_dtype is not None:
        largest = LARGEST_CODE[call.out_dtype]
        query = query.float().clamp(-largest, largest).to(getattr(torch, call.out_dtype))
    return {"out": query.contiguous() if call.out is None else call.out.copy_(query)}


def _scaled_heads(call: RotaryWriteCall[Tensor]) -> Tensor:
    """Returns the heads of all tokens times the factors of tokens and elements, in the type of `qkv`."""
    heads = call.qkv[: call.num_tokens]
    if call.row_scale is None or call.column_scale is None:
        return heads
    return (heads.float() * call.row_scale[:, None, None] * call.column_scale.view(heads.shape[1:])).to(heads.dtype)
