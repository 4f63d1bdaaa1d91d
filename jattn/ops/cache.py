"""Writes into the paged cache, and the merge of partial results, on JAX arrays by keywords."""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

import jax

from jattn.ops.run import run
from torch_core.attention.call import cache_fields
from torch_core.attention.merge_call import MergeCall
from torch_core.base.errors import InvalidInput
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall

__all__ = ["CacheScales", "merge_states", "rotate_and_write", "write_kv_cache", "write_kv_cache_per_token_head"]

#: One array, or a pair of a key cache and a value cache: what comes in comes out.
_Cache = TypeVar("_Cache", jax.Array, tuple[jax.Array, jax.Array])


class CacheScales(TypedDict, total=False):
    """What a stored unit of a quantised cache is worth."""

    k_scale: float | jax.Array | None
    v_scale: float | jax.Array | None


def write_kv_cache(
    key: jax.Array,
    value: jax.Array,
    kv_cache: _Cache,
    slot_mapping: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> _Cache:
    """Writes each token's key and value into its slot of the cache.

    In place where the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot.

    Args:
        key: float[num_tokens, num_kv_heads, head_size].
        value: like key; its head size may differ for a pair of caches.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or a pair of a key cache and a value cache
            without the second axis; consumed.
        slot_mapping: int32[num_tokens] or fewer, `block * block_size + offset`; -1 writes nothing, and neither do
            tokens after the last slot.
        k_scale, v_scale: stored value = real value / scale, saturating, for an fp8 cache.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        The cache with the new tokens in it; a pair for a pair.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> key, cache = jnp.ones((2, 1, 8)), jnp.zeros((3, 2, 4, 1, 8))  # 3 blocks of 4 tokens
        >>> cache = write_kv_cache(key, key, cache, jnp.array([6, -1]))  # one token into block 1, one nowhere
        >>> cache[1, 0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    call = WriteCall(
        key=key,
        value=value,
        **cache_fields(kv_cache),
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return _written(run(call, implementation))


def rotate_and_write(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    cos_sin: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    is_neox_style: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates queries and keys and writes keys and values into their slots: one launch on CUDA.

    In place where the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot. The heads cannot be split over
    devices outside `jax.shard_map`.

    Args:
        qkv: float[num_tokens, num_heads + 2 * num_kv_heads, head_size]: queries, keys and values, as one product makes
            them.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]; consumed.
        slot_mapping, k_scale, v_scale: as in `write_kv_cache`.
        cos_sin: float[num_tokens, rotated_dim], of each token the cosines of all angles and then the sines; elements
            of a head behind rotated_dim stay as they are.
        is_neox_style: element i is rotated with element i + rotated_dim / 2; otherwise neighbours are.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        The rotated queries, float[num_tokens, num_heads, head_size], and the cache with the new tokens in it.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here, or the heads are split.
    """
    call = RotaryWriteCall(
        qkv=qkv,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        cos_sin=cos_sin,
        k_scale=k_scale,
        v_scale=v_scale,
        is_neox_style=is_neox_style,
    )
    results = run(call, implementation)
    return results["out"], results["kv_cache"]


def write_kv_cache_per_token_head(
    key: jax.Array,
    value: jax.Array,
    kv_cache: _Cache,
    k_scale_cache: jax.Array,
    v_scale_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[_Cache, jax.Array, jax.Array]:
    """Writes each token's key and value into its slot of a quantised cache, with a scale of its own for every head.

    The scale of a row is `max(max(abs(row)) / largest, 1e-6)` with 127 for int8, 448 for e4m3 and 57344 for e5m2, as in
    vLLM's `triton_reshape_and_cache_flash_per_token_head_quant`. In place where the caller donated all three caches.

    Args:
        key: float[num_tokens, num_kv_heads, head_size].
        value: like key.
        kv_cache: as in `write_kv_cache`, int8 or fp8; consumed.
        k_scale_cache: float32[num_blocks, block_size, num_kv_heads]; consumed.
        v_scale_cache: like k_scale_cache.
        slot_mapping: as in `write_kv_cache`.
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        kv_cache, k_scale_cache and v_scale_cache with the new tokens in them.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here, or the cache's elements are the real values.
    """
    if k_scale_cache is None or v_scale_cache is None:
        raise InvalidInput("k_scale_cache and v_scale_cache are needed; for scales per tensor use write_kv_cache.")
    call = WriteCall(
        key=key,
        value=value,
        **cache_fields(kv_cache),
        slot_mapping=slot_mapping,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )
    results = run(call, implementation)
    return _written(results), results["k_scale_cache"], results["v_scale_cache"]


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array,
    lse_b: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Joins two results over disjoint keys, as if the queries had seen all keys at once.

    The formula of "FlashInfer" (Ye et al. 2025, section 2.2) and of vLLM's merge_attn_states; natural logarithms. A
    side with lse -inf (or +inf, as some kernels mark an empty row) counts for nothing, whatever its output holds.

    Args:
        out_a, out_b: float[num_tokens, num_heads, head_size].
        lse_a, lse_b: float32[num_tokens, num_heads].
        implementation: "triton", "torch", "xla", or None for the fastest that serves the call.

    Returns:
        The joined output in the dtype of out_a, and its LSE; zeros and -inf where both sides are empty.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit.
        Unsupported: a dtype without an implementation, or an implementation that cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> ones, lse = jnp.ones((1, 1, 2)), jnp.zeros((1, 1))
        >>> out, _ = merge_states(ones, lse, 3 * ones, lse)
        >>> out.tolist()
        [[[2.0, 2.0]]]
    """
    results = run(MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b), implementation)
    return results["out"], results["lse"]


def _written(results: dict[str, jax.Array]) -> Any:
    return results["kv_cache"] if "kv_cache" in results else (results["key_cache"], results["value_cache"])
