"""What a unit of an 8-bit cache is worth in one layer, and how large a layer's keys and values get."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.nn.latent import MultiHeadLatentAttention
from jattn.nn.paged import PagedAttention

__all__ = ["KVRange", "KVScale", "KVScales", "paged_layers"]


class KVScale(nnx.Variable):
    """Of the keys or the values of one layer; no parameter, so that no optimiser moves it."""


class KVScales(nnx.Module):
    """The scales of one layer's 8-bit cache; `kv_scales` of a layer.

    Args:
        k_scale: what a stored unit of a key, or of a latent, is worth; above 0.
        v_scale: the same of a value.
    """

    def __init__(self, k_scale: float, v_scale: float) -> None:
        self.k_scale, self.v_scale = (KVScale(jnp.array([scale], jnp.float32)) for scale in (k_scale, v_scale))


class KVRange(nnx.Module):
    """Notes the largest absolute key and value that a layer writes; `kv_range` of a layer."""

    def __init__(self) -> None:
        self.k_max, self.v_max = (KVScale(jnp.zeros(1, jnp.float32)) for _ in range(2))

    def see(self, key: jax.Array, value: jax.Array, slot_mapping: jax.Array) -> None:
        """Looks at [num_tokens, ...] keys and values, but for those that are not written."""
        written = (slot_mapping >= 0)[:, None, None]
        for largest, array in ((self.k_max, key), (self.v_max, value)):
            seen = jnp.where(written, jnp.abs(array[: len(slot_mapping)].astype(jnp.float32)), 0)
            largest[...] = jnp.maximum(largest[...], seen.max())


def paged_layers(model: nnx.Module) -> Iterator[tuple[str, PagedAttention | MultiHeadLatentAttention]]:
    """Yields a model's layers that write a cache, each with its path, as "layers.0.self_attn.paged_attention"."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention | MultiHeadLatentAttention):
            yield ".".join(map(str, path)), module
