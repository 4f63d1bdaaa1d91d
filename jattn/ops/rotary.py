"""Rotary embedding in plain jnp, by cosines and sines of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.ops.softmax import wide_dtype


def rotate(heads: jax.Array, cos_sin: jax.Array, *, is_neox_style: bool) -> jax.Array:
    """Returns `[..., size]` with its first elements rotated in float32 by `[..., rotated_dim]`, in its own dtype."""
    size = cos_sin.shape[-1]
    part = heads[..., :size].astype(wide_dtype(heads.dtype))
    cos, sin = jnp.split(cos_sin.astype(jnp.float32).astype(part.dtype), 2, axis=-1)
    x, y = jnp.split(part, 2, axis=-1) if is_neox_style else (part[..., 0::2], part[..., 1::2])
    turned = [x * cos - y * sin, y * cos + x * sin]
    rotated = jnp.concatenate(turned, axis=-1) if is_neox_style else jnp.stack(turned, axis=-1).reshape(part.shape)
    return jnp.concatenate([rotated.astype(heads.dtype), heads[..., size:]], axis=-1)
