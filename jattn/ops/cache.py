"""Writes into the paged cache on JAX arrays: by keywords, and in plain jnp."""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.quantise import quantised
from jattn.ops.run import run
from jattn.ops.xla import JaxOp, register
from torch_core.attention.checks import cache_fields
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import LARGEST_CODE, SMALLEST_SCALE
from torch_core.cache_writes.call import CopyCall, WriteCall

#: One array, or a pair of a key cache and a value cache; the result has the same form.
_Cache = TypeVar("_Cache", jax.Array, tuple[jax.Array, jax.Array])


class CacheScales(TypedDict, total=False):
    """The dequantisation scale of a quantised cache."""

    k_scale: float | jax.Array | None
    v_scale: float | jax.Array | None


@documented(WriteCall)
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

    In place if the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot.

    Returns:
        The cache with the new tokens in it; a pair for a pair.

    Example:
        >>> import jax.numpy as jnp
        >>> key, cache = jnp.ones((2, 1, 8)), jnp.zeros((3, 2, 4, 1, 8))  # 3 blocks of 4 tokens
        >>> cache = write_kv_cache(key, key, cache, jnp.array([6, -1]))  # one token into block 1, one nowhere
        >>> cache[1, 0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    call = WriteCall(
        key=key, value=value, **cache_fields(kv_cache), slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    return _written(run(call, implementation))


@documented(WriteCall)
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
    """Writes each token's key and value into its slot of a quantised cache, with one scale per token and head.

    The scale of a row is `max(max(abs(row)) / largest, 1e-6)` with 127 for int8, 448 for e4m3 and 57344 for e5m2, as in
    vLLM's `triton_reshape_and_cache_flash_per_token_head_quant`. In place if the caller donated all three caches.

    Returns:
        kv_cache, k_scale_cache and v_scale_cache with the new tokens in them.

    Raises:
        InvalidInput: ranks, shapes or dtypes do not fit; the message names the argument and the fix.
        Unsupported: the implementation cannot run here, or the cache's elements are the real values.
    """
    if k_scale_cache is None or v_scale_cache is None:
        raise InvalidInput("k_scale_cache", "and v_scale_cache are needed", "for scales per tensor use write_kv_cache")
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


def _written(results: dict[str, jax.Array]) -> Any:
    return results["kv_cache"] if "kv_cache" in results else (results["key_cache"], results["value_cache"])


def write_in_jnp(call: WriteCall[jax.Array]) -> dict[str, jax.Array]:
    """Computes a checked call."""
    num_slots = call.slot_mapping.shape[0]
    blocks, offsets = places(call.slot_mapping, call.num_blocks, call.block_size)
    found, codes = {}, []
    new = (("k_scale_cache", call.key, call.k_scale), ("v_scale_cache", call.value, call.v_scale))
    for name, real, scale in new:
        real = real[:num_slots]
        scale_cache = getattr(call, name)
        if scale_cache is not None:
            largest = jnp.abs(real.astype(jnp.float32)).max(-1)
            scale = jnp.maximum(largest / LARGEST_CODE[call.cache_dtype], SMALLEST_SCALE)
            found[name] = scale_cache.at[blocks, offsets].set(scale, mode="drop")
            scale = scale[..., None]
        codes.append(quantised(real, scale, call.cache_dtype))
    if call.kv_cache is not None:
        both = jnp.stack(codes, axis=1)
        found["kv_cache"] = call.kv_cache.at[blocks[:, None], jnp.arange(2), offsets[:, None]].set(both, mode="drop")
        return found
    for name, cache, code in zip(("key_cache", "value_cache"), (call.key_cache, call.value_cache), codes, strict=True):
        found[name] = cache.at[blocks, offsets].set(code, mode="drop")  # type: ignore[union-attr]
    return found


def places(slot_mapping: jax.Array, num_blocks: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns block and offset of each slot. A negative index would wrap around; one past the end is dropped."""
    return jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size), slot_mapping % block_size


def _copy_blocks(call: CopyCall[jax.Array]) -> dict[str, jax.Array]:
    cache, pairs = call.kv_cache, call.block_mapping
    sources, targets = jnp.where((pairs >= 0).all(1), pairs.T, jnp.array([[0], [cache.shape[0]]], jnp.int32))
    return {"kv_cache": cache.at[targets].set(cache[sources], mode="drop")}


register(JaxOp(call=WriteCall, jnp=write_in_jnp, jnp_derivative=True))
register(JaxOp(call=CopyCall, jnp=_copy_blocks))
