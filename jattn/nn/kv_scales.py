"""The scales of one layer's 8-bit cache, and the measured range of its keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class KVScale(nnx.Variable):
    """A number for the keys or the values of one layer. It is no parameter: optimisers do not update it."""


class KVScales(nnx.Module):
    """The scales of one layer's 8-bit cache; `kv_scales` of a layer.

    Args:
        k_scale: dequantisation scale of keys, or of latents: key = stored key * k_scale; above 0.
        v_scale: dequantisation scale of values; above 0.
    """

    def __init__(self, k_scale: float, v_scale: float) -> None:
        self.k_scale, self.v_scale = (KVScale(jnp.array([scale], jnp.float32)) for scale in (k_scale, v_scale))


class KVRange(nnx.Module):
    """Records the largest absolute key and value that a layer writes; `kv_range` of a layer."""

    def __init__(self) -> None:
        self.k_max, self.v_max = (KVScale(jnp.zeros(1, jnp.float32)) for _ in range(2))

    def see(self, key: jax.Array, value: jax.Array, slot_mapping: jax.Array) -> None:
        """Updates the range with keys and values [num_tokens, ...]; those without a slot are ignored."""
        written = (slot_mapping >= 0)[:, None, None]
        for largest, array in ((self.k_max, key), (self.v_max, value)):
            seen = jnp.where(written, jnp.abs(array[: len(slot_mapping)].astype(jnp.float32)), 0)
            largest[...] = jnp.maximum(largest[...], seen.max())
