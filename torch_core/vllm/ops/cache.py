"""vLLM's writes into the paged cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.cache_writes.call import WriteCall
from torch_core.ops import run
from torch_core.vllm.ops.arguments import Scale, as_int32, as_stored, refuse_4_bits, refuse_option, stored_dtype
from torch_core.vllm.ops.parameters import as_in_vllm


@as_in_vllm(key=3, value=3)
def triton_reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    k_scale: Scale, v_scale: Scale, interleaved_v_pack_factor: int = 0,
) -> None:  # fmt: skip
    """Writes new keys and values at their slots; an fp8 cache stores value / scale, saturated.

    Args:
        key, value: [num_tokens or more, num_kv_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size]; uint8 memory is taken as
            kv_cache_dtype.
        slot_mapping: int32 or int64 [num_tokens]; negative ones are skipped.
        kv_cache_dtype: a name of `CACHE_DTYPES` but "int8"; "half" and "float" too.
        k_scale, v_scale: one element, or one for each key/value head; used by fp8 caches only.
        interleaved_v_pack_factor: must be 0.

    Raises:
        Unsupported: another kv_cache_dtype or scale, packed values, or head-major 5-D caches.
    """
    refuse_option("interleaved_v_pack_factor", interleaved_v_pack_factor, 0, "values are not interleaved here")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.ndim != 4:
            wanted = "only [num_blocks, block_size, num_kv_heads, head_size] is served"
            raise Unsupported(name, f"has {cache.ndim} axes", wanted)
    quantized, scales = stored_dtype(kv_cache_dtype), {}
    if quantized is not None:
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if cache.dtype.itemsize != 1:
                raise InvalidInput(name, f"is {cache.dtype}", f"it must be uint8 or {quantized} for {kv_cache_dtype!r}")
        key_cache, value_cache = key_cache.view(quantized), value_cache.view(quantized)
        key, scales["k_scale"] = as_stored("k_scale", key, k_scale, quantized)
        value, scales["v_scale"] = as_stored("v_scale", value, v_scale, quantized)
    _write(key, value, key_cache, value_cache, slot_mapping, **scales)


@as_in_vllm(key=3, value=3, kv_cache=4)
def triton_reshape_and_cache_flash_diffkv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, k_scale: Scale,
    v_scale: Scale,
) -> None:  # fmt: skip
    """The counterpart of `triton_reshape_and_cache_flash` for a cache whose last axis holds a key and then a value.

    Args:
        key, value: [num_tokens or more, num_kv_heads, head size of either].
        kv_cache: [num_blocks, block_size, num_kv_heads, key_head_size + value_head_size].
        slot_mapping, kv_cache_dtype, k_scale, v_scale: as in `triton_reshape_and_cache_flash`.

    Raises:
        Unsupported: another kv_cache_dtype or scale.
    """
    sizes = [key.shape[-1], value.shape[-1]]
    if kv_cache.shape[-1] != sum(sizes):
        raise InvalidInput("kv_cache", f"has {kv_cache.shape[-1]} elements per head", f"key and value have {sizes}")
    caches = kv_cache.split(sizes, dim=-1)
    triton_reshape_and_cache_flash(key, value, caches[0], caches[1], slot_mapping, kv_cache_dtype, k_scale, v_scale)


@as_in_vllm()
def triton_reshape_and_cache_flash_per_token_head_quant(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, k_scale_cache: Tensor, v_scale_cache: Tensor,
    slot_mapping: Tensor, kv_quant_mode: Any,
) -> None:  # fmt: skip
    """Quantises keys and values with a scale per token and head and writes both.

    Args:
        key, value: [num_tokens or more, num_kv_heads, head_size].
        key_cache, value_cache: int8 or fp8 [num_blocks, block_size, num_kv_heads, head_size].
        k_scale_cache, v_scale_cache: float32 [num_blocks, block_size, num_kv_heads].
        slot_mapping: int32 or int64 [num_tokens].
        kv_quant_mode: vLLM's enum; the dtype of the caches says int8 or fp8.

    Raises:
        Unsupported: a 4-bit mode, or caches that are neither int8 nor fp8.
    """
    refuse_4_bits(kv_quant_mode)
    _write(key, value, key_cache, value_cache, slot_mapping, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **scales: Any
) -> None:
    slots = as_int32("slot_mapping", slot_mapping)
    run(WriteCall(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, **scales))
