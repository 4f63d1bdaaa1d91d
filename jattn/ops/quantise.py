"""Elements of 8-bit arrays in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from torch_core.base.specs import LARGEST_CODE


def quantised(x: jax.Array, scale: jax.Array | float | None, dtype: str) -> jax.Array:
    """Returns `x / scale` as elements of `dtype`; one-byte types saturate, int8 rounds to the nearest even."""
    one_byte = dtype in LARGEST_CODE
    if x.dtype.name == dtype and one_byte:
        return x
    if scale is not None or one_byte:
        x = x.astype(jnp.float32)
    if scale is not None:
        # One number, or one for each row.
        x = x / (scale if jnp.ndim(scale) == x.ndim else jnp.reshape(scale, ()))
    if one_byte:
        x = jnp.clip(x, -LARGEST_CODE[dtype], LARGEST_CODE[dtype])
    return (jnp.round(x) if dtype == "int8" else x).astype(dtype)


def scaled(array: jax.Array, scale: jax.Array | float | None) -> jax.Array:
    """Returns `array * scale`; None is 1."""
    return array if scale is None else array * jnp.asarray(scale, array.dtype).reshape(())


def e4m3_rows(x: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns rows, or parts of rows along a mesh axis, as E4M3 numbers, and their float32 scales [..., 1]."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    if axis is not None:
        largest = jax.lax.pmax(largest, axis)
    # Not 0, for rows of zeros or tiny values. Values that are not finite stay so: an infinity makes its whole row NaN.
    unit = jnp.maximum(largest / LARGEST_CODE["float8_e4m3fn"], jnp.finfo(jnp.float32).tiny)
    return (wide / unit).astype(jnp.float8_e4m3fn), unit
