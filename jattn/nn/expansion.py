"""The expansion of latents to keys and values as one linear layer, or as one for keys and one for values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class LatentExpansion(nnx.Module):
    """A `kv_b_proj` in two parts, for the absorbed form of latent attention, whose products each read one of them.

    XLA reads no part of an array in a product: it would copy both parts in every step.

    Args:
        linear: the layer of both, [rank, heads x (key_size + value_size)].
        key_size, value_size: elements of a head's key without its rotary part, and of its value.
    """

    def __init__(self, linear: nnx.Linear, key_size: int, value_size: int) -> None:
        self.key_size, self.value_size = key_size, value_size
        keys, values = split_kernel(jnp.asarray(linear.kernel[...]), key_size, value_size)
        self.k_b_proj, self.v_b_proj = _with_kernel(linear, keys), _with_kernel(linear, values)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the layer of both returns."""
        return _joined(self.k_b_proj(x), self.v_b_proj(x), self.key_size, self.value_size)

    def kernels(self) -> tuple[jax.Array, jax.Array]:
        """Returns the kernels [rank, heads, key_size] and [rank, heads, value_size]."""
        keys, values = self.k_b_proj.kernel[...], self.v_b_proj.kernel[...]
        return keys.reshape(len(keys), -1, self.key_size), values.reshape(len(values), -1, self.value_size)

    def whole(self) -> nnx.Linear:
        """Returns the layer of both."""
        keys, values = self.k_b_proj.kernel[...], self.v_b_proj.kernel[...]
        return _with_kernel(self.k_b_proj, _joining(self.key_size, self.value_size, keys.sharding)(keys, values))


def split_kernel(kernel: jax.Array, key_size: int, value_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the columns of all heads' keys, and those of their values, split over devices as the kernel is."""
    return _splitting(key_size, value_size, kernel.sharding)(kernel)


@functools.lru_cache(maxsize=64)
def _splitting(key_size: int, value_size: int, sharding: Any) -> Callable[..., Any]:
    def split(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = kernel.reshape(len(kernel), -1, key_size + value_size)
        return heads[..., :key_size].reshape(len(kernel), -1), heads[..., key_size:].reshape(len(kernel), -1)

    return jax.jit(split, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _joining(key_size: int, value_size: int, sharding: Any) -> Callable[..., Any]:
    join = functools.partial(_joined, key_size=key_size, value_size=value_size)
    return jax.jit(join, out_shardings=sharding)


def _joined(keys: jax.Array, values: jax.Array, key_size: int, value_size: int) -> jax.Array:
    by_head = (x.reshape(*x.shape[:-1], -1, size) for x, size in ((keys, key_size), (values, value_size)))
    joined = jnp.concatenate(list(by_head), -1)
    return joined.reshape(*joined.shape[:-2], -1)


def _with_kernel(linear: nnx.Linear, kernel: jax.Array) -> nnx.Linear:
    changed = nnx.merge(*nnx.split(linear))
    changed.kernel, changed.out_features = nnx.Param(kernel), kernel.shape[1]
    return changed
