"""Rotary embedding for CPU tensors, alone and with the write of keys and values."""

from __future__ import annotations

from torch import Tensor

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
    heads, value = call.qkv.split(parts, dim=1)
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
    return {"out": query.contiguous() if call.out is None else call.out.copy_(query)}
