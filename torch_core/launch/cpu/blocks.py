"""Writes into the paged cache and copies of blocks, for CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_core.launch.cpu.gather import CachePair

__all__ = ["copy_blocks", "write_kv_cache"]

_SMALLEST_SCALE = 1e-6


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: CachePair,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Stores new keys and values, in place; see `torch_core.launch`. Nothing is checked but what torch checks."""
    slots = slot_mapping.tolist()
    tokens: slice | Tensor = slice(0, len(slots))
    if slots and min(slots) < 0:
        tokens = torch.tensor([token for token, slot in enumerate(slots) if slot >= 0])
        slots = [slot for slot in slots if slot >= 0]
    if not slots:
        return
    if isinstance(kv_cache, Tensor):
        block_size = kv_cache.shape[2]
        caches = (kv_cache, kv_cache)
        # Keys of block b start at row 2 b block_size of the flat cache, its values block_size rows later.
        key_rows = [slot + slot // block_size * block_size for slot in slots]
        rows = (key_rows, [row + block_size for row in key_rows])
    else:
        caches, rows = kv_cache, (slots, slots)
    sources = (key, value)
    scales = (k_scale, v_scale)
    scale_caches = (k_scale_cache, v_scale_cache)
    for new, cache, places, scale, scale_cache in zip(sources, caches, rows, scales, scale_caches, strict=True):
        new = new[tokens]
        if scale_cache is not None:
            largest = _largest_code(cache.dtype)
            scale = (new.float().abs().amax(-1) / largest).clamp_(min=_SMALLEST_SCALE)
            scale_cache.view(-1, scale_cache.shape[-1])[torch.tensor(slots)] = scale
            scale = scale[..., None]
        codes = _encode(new, scale, cache.dtype)
        flat = cache.view(-1, *cache.shape[-2:])
        index = torch.tensor(places)
        if flat.dtype.itemsize == 1:
            flat, codes = flat.view(torch.uint8), codes.view(torch.uint8)
        flat.index_copy_(0, index, codes)


def copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks inside each array, in place; see `torch_core.launch`. Nothing is checked."""
    pairs = [pair for pair in block_mapping.tolist() if min(pair) >= 0]
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs).unbind(1)
    for kv_cache in [kv_caches] if isinstance(kv_caches, Tensor) else kv_caches:
        raw = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
        raw.index_copy_(0, destinations, raw.index_select(0, sources))


def _encode(real: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """Returns `real / scale` as elements of the cache: fp8 and int8 saturate, int8 rounds to the nearest even."""
    if real.dtype == dtype and dtype.itemsize == 1:
        return real
    if scale is not None:
        real = real.float() / scale
    if dtype.itemsize == 1:
        largest = _largest_code(dtype)
        real = real.float().clamp(-largest, largest)
        if dtype == torch.int8:
            real = real.round_()
    return real.to(dtype)


def _largest_code(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
