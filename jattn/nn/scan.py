"""The layers of a model: equal ones in one `lax.scan` over one pool, and those that write a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.metadata import AttentionMetadata
from jattn.nn.latent import MultiHeadLatentAttention
from jattn.nn.paged import PagedAttention
from torch_core.base.errors import InvalidInput

_Cache = TypeVar("_Cache", jax.Array, tuple[jax.Array, jax.Array])


def scan_layers(
    step: Callable[[Any, jax.Array, _Cache, AttentionMetadata], tuple[jax.Array, _Cache]],
    layers: nnx.Module,
    x: jax.Array,
    kv_cache: _Cache,
    metadata: AttentionMetadata,
) -> tuple[jax.Array, _Cache]:
    """Runs L equal layers one after the other; only one layer is traced and compiled.

    The pool has L x N blocks, and layer l owns blocks l * N to (l + 1) * N - 1: its block tables and slots are shifted
    by l * N. So the pool stays one array in the carry of the loop and is written in place. A stacked cache
    `[L, N, ...]` would be sliced, and therefore copied, in every layer.

    Args:
        step: `step(layer, x, kv_cache, metadata)` returns the next x and the cache.
        layers: a module whose variables have a leading axis of length L, as built by `nnx.vmap` over seeds.
        x: input of the first layer.
        kv_cache: [L * N, 2, block_size, num_kv_heads, head_dim], or a pair of caches. It is consumed.
        metadata: metadata of one layer, with block ids below N.

    Returns:
        The output of the last layer, and the updated cache.

    Raises:
        InvalidInput: the number of blocks is not a multiple of L, or slots exceed int32.

    Example:
        >>> from jattn.nn import MultiHeadAttention
        >>> make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: MultiHeadAttention(2, 8, rngs=rngs)))
        >>> layers = make(nnx.Rngs(0))
        >>> metadata = AttentionMetadata(
        ...     block_tables=jnp.array([[1]], jnp.int32), seq_lens=jnp.array([4], jnp.int32),
        ...     query_start_loc=jnp.array([0, 4], jnp.int32), slot_mapping=jnp.arange(4, 8, dtype=jnp.int32),
        ...     max_query_len=4)
        >>> def step(layer, x, cache, metadata):
        ...     y, cache = layer(x, cache=cache, metadata=metadata)
        ...     return x + y, cache
        >>> x, cache = scan_layers(step, layers, jnp.ones((4, 8)), jnp.zeros((3 * 2, 2, 4, 2, 4)), metadata)
        >>> x.shape, cache.shape
        ((4, 8), (6, 2, 4, 2, 4))
    """
    graph, state = nnx.split(layers)
    num_layers = jax.tree.leaves(state)[0].shape[0]
    first = jax.tree.leaves(kv_cache)[0]
    num_blocks, block_size = first.shape[0], first.shape[-3]
    if num_blocks % num_layers or num_blocks * block_size > jnp.iinfo(jnp.int32).max:
        problem = f"has {num_blocks} blocks of {block_size} tokens for {num_layers} layers"
        raise InvalidInput("kv_cache", problem, "it must be a multiple of the layers, with slots below 2**31")

    def body(carry: tuple[jax.Array, _Cache], layer: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, _Cache], None]:
        index, variables = layer
        shifted = _layer_metadata(metadata, index * (num_blocks // num_layers), block_size)
        return step(nnx.merge(graph, variables), *carry, shifted), None

    scanned = (jnp.arange(num_layers, dtype=jnp.int32), state)
    return jax.lax.scan(body, (x, kv_cache), scanned)[0]


def _layer_metadata(metadata: AttentionMetadata, first_block: jax.Array | int, block_size: int) -> AttentionMetadata:
    """Returns the metadata of a layer whose blocks start at `first_block` of a pool shared by several layers."""
    slots = metadata.slot_mapping
    return replace(
        metadata,
        block_tables=metadata.block_tables + first_block,
        slot_mapping=jnp.where(slots < 0, slots, slots + first_block * block_size),
    )


def paged_layers(model: nnx.Module) -> Iterator[tuple[str, PagedAttention | MultiHeadLatentAttention]]:
    """Yields each layer of a model that writes a cache, with its path, such as "layers.0.self_attn.paged_attention"."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention | MultiHeadLatentAttention):
            yield ".".join(map(str, path)), module
