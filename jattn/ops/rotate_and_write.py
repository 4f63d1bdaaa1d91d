"""Rotary embedding of queries and keys, and the write of keys and values, on JAX arrays: by keywords, and in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.arguments import documented
from jattn.ops.cache import write_in_jnp
from jattn.ops.quantise import quantised
from jattn.ops.run import run
from jattn.ops.softmax import wide_dtype
from jattn.ops.xla import JaxOp, register
from torch_core.cache_writes.call import WriteCall
from torch_core.cache_writes.rotary_call import RotaryWriteCall


@documented(RotaryWriteCall)
def rotate_and_write(
    qkv: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    cos_sin: jax.Array,
    *,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    is_neox_style: bool = True,
    out_dtype: str | None = None,
    num_query_heads: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates queries and keys and writes keys and values into their slots: one launch on CUDA.

    In place if the caller donated the cache to the jitted step (`KVPool.run` does); otherwise XLA copies it first.
    Use the returned array and never the old one. Two tokens must not share a slot. The heads cannot be split over
    devices outside `jax.shard_map`.

    Returns:
        The rotated queries, float[num_tokens, num_heads, head_size], and the cache with the new tokens in it.
    """
    call = RotaryWriteCall(
        qkv=qkv,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        cos_sin=cos_sin,
        k_scale=k_scale,
        v_scale=v_scale,
        row_scale=row_scale,
        column_scale=column_scale,
        is_neox_style=is_neox_style,
        out_dtype=out_dtype,
        num_query_heads=num_query_heads,
    )
    results = run(call, implementation)
    return results["out"], results["kv_cache"]


def _rotate_and_write(call: RotaryWriteCall[jax.Array]) -> dict[str, jax.Array]:
    call = call.of_heads()
    heads = call.qkv[: call.num_tokens]
    if call.row_scale is not None and call.column_scale is not None:
        wide = heads.astype(wide_dtype(heads.dtype)) * call.row_scale[:, None, None]
        heads = (wide * call.column_scale.reshape(1, *heads.shape[1:])).astype(heads.dtype)
    heads, value = jnp.split(heads, (call.num_heads + call.num_kv_heads,), axis=1)
    heads = rotate(heads, call.cos_sin[:, None], is_neox_style=call.is_neox_style)
    query, key = jnp.split(heads, (call.num_heads,), axis=1)
    new = {"key": key, "value": value, "slot_mapping": call.slot_mapping, "kv_cache": call.kv_cache}
    if call.out_dtype is not None:
        query = quantised(query, None, call.out_dtype)
    return {"out": query, **write_in_jnp(WriteCall(**new, k_scale=call.k_scale, v_scale=call.v_scale))}


def rotate(heads: jax.Array, cos_sin: jax.Array, *, is_neox_style: bool) -> jax.Array:
    """Returns `[..., size]` with its first elements rotated in float32 by `[..., rotated_dim]`, in its own dtype."""
    size = cos_sin.shape[-1]
    part = heads[..., :size].astype(wide_dtype(heads.dtype))
    cos, sin = jnp.split(cos_sin.astype(jnp.float32).astype(part.dtype), 2, axis=-1)
    x, y = jnp.split(part, 2, axis=-1) if is_neox_style else (part[..., 0::2], part[..., 1::2])
    turned = [x * cos - y * sin, y * cos + x * sin]
    rotated = jnp.concatenate(turned, axis=-1) if is_neox_style else jnp.stack(turned, axis=-1).reshape(part.shape)
    return jnp.concatenate([rotated.astype(heads.dtype), heads[..., size:]], axis=-1)


register(JaxOp(call=RotaryWriteCall, jnp=_rotate_and_write, jnp_derivative=True))
