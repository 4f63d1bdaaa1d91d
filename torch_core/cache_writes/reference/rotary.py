"""The result of rotation and write in one call, pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.attention.reference.sequence import on_the_host
from torch_core.base.specs import LARGEST_CODE
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.reference.cache import write_kv_cache
from torch_core.cache_writes.rotary_call import RotaryWriteCall


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
    heads = _scaled(call)
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
