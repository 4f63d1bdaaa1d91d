"""Writes into the paged cache and copies of blocks, for CPU tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.cpu.gather import raw_array
from torch_core.base.specs import LARGEST_CODE, SMALLEST_SCALE
from torch_core.cache_writes.call import CopyCall, WriteCall


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
