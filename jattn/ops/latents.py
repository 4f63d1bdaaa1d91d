"""Packed latents and rotated keys in plain jnp; see `torch_core.base.specs.LatentCacheSpec` for the bytes of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.rotary import rotate
from torch_core.base.specs import PACKED_GROUP
from torch_core.latent.call import LatentWriteCall

_LARGEST = 448.0


def packed(kv_c: jax.Array, k_pe: jax.Array) -> jax.Array:
    """Returns the rows, uint8[tokens, bytes], of latents and rotated keys."""
    tokens = kv_c.shape[0]
    groups = kv_c.astype(jnp.float32).reshape(tokens, -1, PACKED_GROUP)
    # XLA multiplies by the reciprocal instead: a scale may have another last bit than everywhere else.
    scales = jnp.maximum(jnp.abs(groups).max(-1) / _LARGEST, jnp.finfo(jnp.float32).tiny)
    codes = jnp.clip(groups / scales[..., None], -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    parts = (codes, scales, k_pe.astype(jnp.bfloat16))
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(tokens, -1) for x in parts], axis=1)


def unpacked(rows: jax.Array, kv_lora_rank: int) -> jax.Array:
    """Returns the dequantised values of packed rows uint8[..., bytes], float32[..., kv_lora_rank + rope_dim]."""
    groups = kv_lora_rank // PACKED_GROUP
    codes, scales, rotary = jnp.split(rows, (kv_lora_rank, kv_lora_rank + 4 * groups), axis=-1)
    latents = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    scales = jax.lax.bitcast_convert_type(scales.reshape(*rows.shape[:-1], groups, 4), jnp.float32)
    rotary = jax.lax.bitcast_convert_type(rotary.reshape(*rows.shape[:-1], -1, 2), jnp.bfloat16)
    latents = latents.reshape(*scales.shape, PACKED_GROUP) * scales[..., None]
    return jnp.concatenate([latents.reshape(codes.shape), rotary.astype(jnp.float32)], axis=-1)


def rotated(call: LatentWriteCall[jax.Array]) -> jax.Array:
    """Returns the rotary keys of a call's slots, rotated if the call has positions."""
    count = call.slot_mapping.shape[0]
    keys = call.k_pe[:count]
    if call.cos_sin_cache is None or call.positions is None:
        return keys
    return rotate(keys, call.cos_sin_cache[call.positions[:count]], is_neox_style=call.is_neox_style)
