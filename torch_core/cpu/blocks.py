"""Writes into the paged cache and copies of blocks, for CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torch_core.cpu.gather import CachePair, raw_array

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
    """Stores new keys and values, in place; see `torch_core.run`. Nothing is checked but that blocks exist."""
    slots = slot_mapping.numpy()
    written: slice | np.ndarray = slice(0, len(slots))
    if len(slots) == 0:
        return
    if slots.min() < 0:
        written = np.flatnonzero(slots >= 0)
        slots = slots[written]
    if isinstance(kv_cache, Tensor):
        both = raw_array(kv_cache)
        key_cache, value_cache, cache_dtype = both[:, 0], both[:, 1], kv_cache.dtype
    else:
        key_cache, value_cache, cache_dtype = raw_array(kv_cache[0]), raw_array(kv_cache[1]), kv_cache[0].dtype
    places = np.divmod(slots, key_cache.shape[1])
    key_cache[places] = raw_array(_encode(key, k_scale, k_scale_cache, places, written, cache_dtype))[written]
    value_cache[places] = raw_array(_encode(value, v_scale, v_scale_cache, places, written, cache_dtype))[written]


def copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks inside each array, in place; see `torch_core.run`. Nothing is checked."""
    pairs = [pair for pair in block_mapping.tolist() if min(pair) >= 0]
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs).unbind(1)
    for kv_cache in [kv_caches] if isinstance(kv_caches, Tensor) else kv_caches:
        raw = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
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
    if scale_cache is not None:
        scale = (real.float().abs().amax(-1) / _largest_code(dtype)).clamp_(min=_SMALLEST_SCALE)
        scale_cache.numpy()[places] = scale.numpy()[written]
        scale = scale[..., None]
    if real.dtype is dtype and (scale is None or dtype.itemsize == 1):
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
