"""The specification of cache writes in plain torch: token by token, and pair by pair of rotated elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_core.attention.reference.sequence import on_the_host
from torch_core.base.specs import LARGEST_CODE, SMALLEST_SCALE
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall


def write_kv_cache(call: WriteCall[Tensor]) -> None:
    """Stores new keys and values in the cache, in place.

    Token `t` goes to block `slot_mapping[t] // block_size`, offset `slot_mapping[t] % block_size`. A negative slot
    (`PAD_SLOT_ID`) writes nothing. Nothing else of the cache changes.

    An element is stored as `real / scale`, computed in float32. fp8 caches saturate at their largest finite value
    (NaN stays NaN); int8 rounds to the nearest even and saturates at -127 and 127. A key or value that has the fp8 or
    int8 type of the cache already is stored as it is. With `k_scale_cache` and `v_scale_cache` the scale is found per
    token and head, `max(absmax / largest, 1e-6)`, and stored there.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the cache.

    Example:
        >>> cache, ones = torch.zeros(2, 2, 4, 1, 1), torch.ones(2, 1, 1)
        >>> write_kv_cache(WriteCall(key=ones, value=ones * 2, kv_cache=cache, slot_mapping=torch.tensor([5, -1])))
        >>> cache[1, :, :, 0, 0]
        tensor([[0., 1., 0., 0.],
                [0., 2., 0., 0.]])
    """
    call = on_the_host(call)
    call.check()
    call.check_values()
    caches: Any = (call.key_cache, call.value_cache) if call.kv_cache is None else call.kv_cache.unbind(1)
    for token, slot in enumerate(call.slot_mapping.tolist()):
        if slot >= 0:
            place = divmod(slot, call.block_size)
            _store(call.key[token], caches[0], place, call.k_scale, call.k_scale_cache)
            _store(call.value[token], caches[1], place, call.v_scale, call.v_scale_cache)


def copy_blocks(call: CopyCall[Tensor]) -> None:
    """Copies whole blocks inside an array, in place: the copy of copy-on-write.

    A pair with a negative entry is padding and copies nothing. A destination may occur once only and may not be the
    source of another pair: the order of the copies is not defined.

    Raises:
        InvalidInput: a block beyond the cache, or a destination that occurs twice or is a source.

    Example:
        >>> cache = torch.tensor([[0.0], [1.0], [2.0]])
        >>> copy_blocks(CopyCall(kv_cache=cache, block_mapping=torch.tensor([[1, 2], [-1, -1]])))
        >>> cache.flatten().tolist()
        [0.0, 1.0, 1.0]
    """
    call = on_the_host(call)
    call.check()
    call.check_values()
    for source, destination in call.block_mapping.tolist():
        if min(source, destination) >= 0:
            call.kv_cache[destination] = call.kv_cache[source]


def largest_code(dtype: torch.dtype) -> float:
    """Returns the largest value that a quantised cache element holds: 127, 448 or 57344.

    Example:
        >>> largest_code(torch.float8_e4m3fn)
        448.0
    """
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _store(
    real: Tensor, cache: Tensor, place: tuple[int, int], scale: Tensor | float | None, scale_cache: Tensor | None
) -> None:
    if scale_cache is not None:
        scale_cache[place] = (real.float().abs().amax(dim=-1) / largest_code(cache.dtype)).clamp(min=SMALLEST_SCALE)
        divisor: Tensor | None = scale_cache[place][:, None]
    else:
        divisor = None if scale is None else torch.as_tensor(scale, dtype=torch.float32).to(real.device).reshape(())
    if real.dtype == cache.dtype and cache.dtype.itemsize == 1:
        cache[place].copy_(real)
        return
    codes = real if divisor is None else real.float() / divisor
    if cache.dtype.itemsize == 1:
        largest = largest_code(cache.dtype)
        codes = codes.float().clamp(-largest, largest)
    if cache.dtype == torch.int8:
        codes = codes.round()
    cache[place].copy_(codes.to(cache.dtype))


def rotate_and_write(call: RotaryWriteCall[Tensor]) -> Tensor:
    """Stores rotated keys, and values, in the cache, in place; returns the rotated queries.

    Pair `p` of token `t` is turned by the angle of cosine `cos_sin[t, p]` and sine `cos_sin[t, half + p]`, in float32,
    and rounded to the type of `qkv`; elements after the pairs stay.

    Raises:
        InvalidInput: the call is inconsistent, or a slot is beyond the cache.

    Example:
        >>> ones, cache = torch.ones(1, 3, 2), torch.zeros(2, 2, 1, 1, 2)
        >>> call = RotaryWriteCall(qkv=ones, cos_sin=torch.tensor([[0.0, 1.0]]), kv_cache=cache,
        ...                        slot_mapping=torch.tensor([1], dtype=torch.int32))
        >>> rotate_and_write(call).tolist(), cache[1].flatten().tolist()
        ([[[-1.0, 1.0]]], [-1.0, 1.0, 1.0, 1.0])
    """
    call = on_the_host(call)
    call.check()
    call.check_values()
    heads = _scaled(call.of_heads())
    rotated = heads.clone()
    for token in range(call.num_tokens):
        for head in range(call.num_heads + call.num_kv_heads):
            rotated[token, head] = rotated_pairs(heads[token, head], call.cos_sin[token], call.is_neox_style)
    query, key, value = rotated.split((call.num_heads, call.num_kv_heads, call.num_kv_heads), dim=1)
    new = {"key": key, "value": value, "slot_mapping": call.slot_mapping, "kv_cache": call.kv_cache}
    write_kv_cache(WriteCall(**new, k_scale=call.k_scale, v_scale=call.v_scale))
    if call.out_dtype is not None:
        largest = LARGEST_CODE[call.out_dtype]
        query = query.float().clamp(-largest, largest).to(getattr(torch, call.out_dtype))
    if call.out is not None:
        call.out.copy_(query)
    return query


def _scaled(call: RotaryWriteCall[Tensor]) -> Tensor:
    heads = call.qkv[: call.num_tokens]
    if call.row_scale is None or call.column_scale is None:
        return heads
    return (heads.float() * call.row_scale[:, None, None] * call.column_scale.view(heads.shape[1:])).to(heads.dtype)


def rotated_pairs(row: Tensor, cos_sin: Tensor, is_neox_style: bool) -> Tensor:
    """Returns a row of elements with its pairs rotated by cosines and sines, one of each for a pair."""
    rotated, half = row.clone(), len(cos_sin) // 2
    for pair in range(half):
        first, second = (pair, pair + half) if is_neox_style else (2 * pair, 2 * pair + 1)
        (x, y), (cos, sin) = row[[first, second]].float(), cos_sin[[pair, half + pair]].float()
        rotated[[first, second]] = torch.stack([x * cos - y * sin, y * cos + x * sin]).to(row.dtype)
    return rotated
