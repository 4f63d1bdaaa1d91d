"""What a write into the paged cache stores: slots, scales, saturation, dynamic quantisation; and copies of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_core.errors import InvalidInput

__all__ = ["copy_blocks", "largest_code", "write_kv_cache"]

#: A scale per token and head is never smaller, so that a row of zeros does not divide by zero. vLLM uses the same.
SMALLEST_SCALE = 1e-6


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Stores new keys and values in the cache, in place.

    Token `t` goes to block `slot_mapping[t] // block_size`, offset `slot_mapping[t] % block_size`. A negative slot
    (`PAD_SLOT_ID`) writes nothing. Nothing else of the cache changes.

    An element is stored as `real / scale`, computed in float32. fp8 caches saturate at their largest finite value
    (NaN stays NaN); int8 rounds to the nearest even and saturates at -127 and 127. A key or value that has the fp8 or
    int8 type of the cache already is stored as it is. With `k_scale_cache` and `v_scale_cache` the scale is found per
    token and head, `max(absmax / largest, 1e-6)`, and stored there.

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`.
        value: `[num_tokens, num_kv_heads, value_head_size]`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, or a pair of key and value caches
            `[num_blocks, block_size, num_kv_heads, size]`. Written in place; the caller owns it.
        slot_mapping: int `[rows]`, `rows <= num_tokens`; tokens after it are padding. No slot may occur twice.
        k_scale: one scale for all keys; None for 1.
        v_scale: one scale for all values; None for 1.
        k_scale_cache: float32 `[num_blocks, block_size, num_kv_heads]`, written in place.
        v_scale_cache: the same for values.

    Raises:
        InvalidInput: a slot beyond the cache; more slots than tokens; both kinds of scale at once.

    Example:
        >>> cache = torch.zeros(2, 2, 4, 1, 1)
        >>> write_kv_cache(torch.ones(2, 1, 1), torch.ones(2, 1, 1) * 2, cache, torch.tensor([5, -1]))
        >>> cache[1, :, :, 0, 0]
        tensor([[0., 1., 0., 0.],
                [0., 2., 0., 0.]])
    """
    key_cache, value_cache = kv_cache.unbind(1) if isinstance(kv_cache, Tensor) else kv_cache
    if (k_scale_cache is not None and k_scale is not None) or (v_scale_cache is not None and v_scale is not None):
        raise InvalidInput("k_scale and k_scale_cache (or v_scale and v_scale_cache) are both given; pass one kind.")
    num_blocks, block_size = key_cache.shape[:2]
    slots = slot_mapping.tolist()
    if len(slots) > min(key.shape[0], value.shape[0]):
        raise InvalidInput(
            f"slot_mapping has {len(slots)} entries; key has {key.shape[0]} tokens and value {value.shape[0]}; give at "
            "most one slot per token."
        )
    for token, slot in enumerate(slots):
        if slot >= num_blocks * block_size:
            raise InvalidInput(
                f"slot_mapping[{token}] is {slot}; a cache of {num_blocks} blocks of {block_size} has slots 0 to "
                f"{num_blocks * block_size - 1}."
            )
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        _store(key[token], key_cache[block, offset], k_scale, k_scale_cache, block, offset)
        _store(value[token], value_cache[block, offset], v_scale, v_scale_cache, block, offset)


def copy_blocks(kv_caches: Tensor | Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks inside each cache array, in place: the copy of copy-on-write.

    Args:
        kv_caches: an array whose first axis is the block (a KV cache, a key or value cache, a cache of scales), or
            several, one per layer.
        block_mapping: int `[num_pairs, 2]` of source and destination. A pair with a negative entry is padding and
            copies nothing. A destination may occur once only and may not be the source of another pair: the order of
            the copies is not defined.

    Raises:
        InvalidInput: a block beyond the cache, or a destination that occurs twice or is a source.

    Example:
        >>> cache = torch.tensor([[0.0], [1.0], [2.0]])
        >>> copy_blocks(cache, torch.tensor([[1, 2], [-1, -1]]))
        >>> cache.flatten().tolist()
        [0.0, 1.0, 1.0]
    """
    pairs = [(index, *pair) for index, pair in enumerate(block_mapping.tolist()) if min(pair) >= 0]
    sources = {source for _, source, _ in pairs}
    caches = [kv_caches] if isinstance(kv_caches, Tensor) else kv_caches
    num_blocks = min((cache.shape[0] for cache in caches), default=0)
    seen: set[int] = set()
    for index, source, destination in pairs:
        if max(source, destination) >= num_blocks:
            raise InvalidInput(
                f"block_mapping[{index}] is ({source}, {destination}); the cache has blocks 0 to {num_blocks - 1}."
            )
        if destination in seen or (destination in sources and source != destination):
            raise InvalidInput(
                f"block_mapping[{index}] writes block {destination}, which another pair reads or writes; "
                "give every destination once, and none that is a source."
            )
        seen.add(destination)
    for cache in caches:
        for _, source, destination in pairs:
            cache[destination] = cache[source]


def largest_code(dtype: torch.dtype) -> float:
    """Returns the largest value that a quantised cache element holds: 127, 448 or 57344.

    Example:
        >>> largest_code(torch.float8_e4m3fn)
        448.0
    """
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _store(
    real: Tensor,
    place: Tensor,
    scale: Tensor | float | None,
    scale_cache: Tensor | None,
    block: int,
    offset: int,
) -> None:
    if scale_cache is not None:
        largest = largest_code(place.dtype)
        per_head = (real.float().abs().amax(dim=-1) / largest).clamp(min=SMALLEST_SCALE)
        scale_cache[block, offset] = per_head
        divisor: Tensor | None = per_head[:, None]
    else:
        divisor = None if scale is None else torch.as_tensor(scale, dtype=torch.float32).to(real.device).reshape(())
    if real.dtype == place.dtype and place.dtype.itemsize == 1:
        place.copy_(real)
        return
    codes = real if divisor is None else real.float() / divisor
    if place.dtype.itemsize == 1:
        largest = largest_code(place.dtype)
        codes = codes.float().clamp(-largest, largest)
    if place.dtype == torch.int8:
        codes = codes.round()
    place.copy_(codes.to(place.dtype))
