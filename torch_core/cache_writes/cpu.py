"""Writes into the paged cache, rotated ones too, and copies of blocks, for CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.cpu.gather import raw_array
from torch_core.base.specs import LARGEST_CODE, SMALLEST_SCALE
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall


def write_kv_cache(call: WriteCall[Tensor]) -> None:
    """Stores new keys and values, in place. Nothing is checked but that blocks exist."""
    slots = call.slot_mapping.numpy()
    written: slice | np.ndarray = slice(0, len(slots))
    if len(slots) == 0:
        return
    if slots.min() < 0:
        written = np.flatnonzero(slots >= 0)
        slots = slots[written]
    if call.kv_cache is not None:
        both = raw_array(call.kv_cache)
        caches, dtype = (both[:, 0], both[:, 1]), call.kv_cache.dtype
    else:
        caches, dtype = (raw_array(call.key_cache), raw_array(call.value_cache)), call.key_cache.dtype  # type: ignore[arg-type, union-attr]
    places = np.divmod(slots, caches[0].shape[1])
    new = ((call.key, call.k_scale, call.k_scale_cache), (call.value, call.v_scale, call.v_scale_cache))
    for cache, (real, scale, scale_cache) in zip(caches, new, strict=True):
        cache[places] = raw_array(_encode(real, scale, scale_cache, places, written, dtype))[written]


def copy_blocks(call: CopyCall[Tensor]) -> None:
    """Copies whole blocks inside an array, in place. Nothing is checked."""
    pairs = [pair for pair in call.block_mapping.tolist() if min(pair) >= 0]
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs).unbind(1)
    raw = call.kv_cache.view(torch.uint8) if call.kv_cache.dtype.itemsize == 1 else call.kv_cache
    raw.index_copy_(0, destinations, raw.index_select(0, sources))


def _encode(
    real: Tensor,
    scale: Tensor | float | None,
    scale_cache: Tensor | None,
    places: tuple[np.ndarray, np.ndarray],
    written: slice | np.ndarray,
    dtype: torch.dtype,
) -> Tensor:
    """Returns `real / scale` as cache elements: fp8 and int8 saturate, int8 rounds to even; stores dynamic scales."""
    largest = LARGEST_CODE.get(str(dtype).removeprefix("torch."), 0.0)
    if scale_cache is not None:
        scale = (real.float().abs().amax(-1) / largest).clamp_(min=SMALLEST_SCALE)
        scale_cache.numpy()[places] = scale.numpy()[written]
        scale = scale[..., None]
    if real.dtype is dtype and (scale is None or dtype.itemsize == 1):
        return real
    if scale is not None:
        real = real.float() / scale
    if dtype.itemsize == 1:
        real = real.float().clamp(-largest, largest)
        if dtype == torch.int8:
            real = real.round_()
    return real.to(dtype)


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
    call = call.of_heads()
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
