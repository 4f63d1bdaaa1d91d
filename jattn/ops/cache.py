"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import jax

from jattn.ops import arguments, transforms, xla
from jattn.ops.choose import bridged, choose
from torch_core.errors import InvalidInput

__all__ = ["write_kv_cache", "write_kv_cache_per_token_head"]


def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Writes each token's key and value into its slot of the cache.

    In place where the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot.

    Args:
        key: float[num_tokens, num_kv_heads, head_size].
        value: like key.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]; consumed.
        slot_mapping: int32[num_tokens], `block * block_size + offset`; -1 writes nothing.
        k_scale, v_scale: stored value = real value / scale, saturating, for an fp8 cache.
        implementation: "triton", "torch", "xla", or None for the fastest that runs here.

    Returns:
        The cache with the new tokens in it.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.
    """
    arguments.check_cache(kv_cache)
    arguments.check_tokens(key, value, slot_mapping, kv_cache)
    chosen = choose(implementation)
    arguments.check_float64("kv_cache", kv_cache, chosen)
    operands = arguments.as_jax(
        key,
        value,
        kv_cache,
        slot_mapping,
        arguments.scale_array("k_scale", k_scale),
        arguments.scale_array("v_scale", v_scale),
    )
    if chosen == "xla":
        return xla.write_kv_cache(*operands)
    return transforms.opaque(bridged(chosen).write_kv_cache, "write_kv_cache", chosen)(*operands)


def write_kv_cache_per_token_head(
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    k_scale_cache: jax.Array,
    v_scale_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes each token's key and value into its slot of a quantised cache, with a scale of its own for every head.

    The scale of a row is `max(max(abs(row)) / largest, 1e-6)` with 127 for int8, 448 for e4m3 and 57344 for e5m2, as in
    vLLM's `triton_reshape_and_cache_flash_per_token_head_quant`. In place where the caller donated all three caches.

    Args:
        key: float[num_tokens, num_kv_heads, head_size].
        value: like key.
        kv_cache: int8 or fp8 [num_blocks, 2, block_size, num_kv_heads, head_size]; consumed.
        k_scale_cache: float32[num_blocks, block_size, num_kv_heads]; consumed.
        v_scale_cache: like k_scale_cache.
        slot_mapping: int32[num_tokens], `block * block_size + offset`; -1 writes nothing.
        implementation: "triton", "torch" (CUDA only), "xla", or None for the fastest that runs here.

    Returns:
        kv_cache, k_scale_cache and v_scale_cache with the new tokens in them.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.
    """
    arguments.check_cache(kv_cache)
    arguments.check_tokens(key, value, slot_mapping, kv_cache)
    if k_scale_cache is None or v_scale_cache is None:
        raise InvalidInput("k_scale_cache and v_scale_cache are needed; for scales per tensor use write_kv_cache.")
    arguments.check_scale_caches(kv_cache, k_scale_cache, v_scale_cache)
    if key.dtype == kv_cache.dtype:
        raise InvalidInput(f"key has dtype {key.dtype.name}, that of the cache; it must be a float to be quantised.")
    chosen = choose(implementation)
    operands = arguments.as_jax(key, value, kv_cache, k_scale_cache, v_scale_cache, slot_mapping)
    if chosen == "xla":
        return xla.write_kv_cache_per_token_head(*operands)
    write = bridged(chosen).write_kv_cache_per_token_head
    return transforms.opaque(write, "write_kv_cache_per_token_head", chosen)(*operands)
