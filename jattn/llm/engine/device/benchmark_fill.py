"""Prompts that nobody computed, taken for computed ones, so that what follows a prompt can be measured alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jattn.llm.engine.owner import Owner
from torch_core.base.errors import InvalidInput, Unsupported

__all__ = ["assume_computed"]

# Blocks that differ; a prime, so that no size of a chunk or a table repeats with them.
_PERIOD = 1021
_MOST_TOKENS = 1 << 16
_Caches = tuple[jax.Array, ...]


def assume_computed(owner: Owner, prompts: Sequence[Sequence[int]]) -> None:
    """Fills the pool with noise and tells the prefix cache that it holds these prompts, as far as they fill blocks.

    Noise and not zeros: operands of zeros take less power, and a device under less power runs faster.

    Args:
        owner: of an engine with a prefix cache; what the pool held is gone.
        prompts: token ids.

    Raises:
        InvalidInput: requests are unfinished.
        Unsupported: an engine of several processes.
        OutOfBlocks: the pool is too small.
    """
    device = owner.device
    if owner.requests:
        raise InvalidInput(f"{len(owner.requests)} requests are unfinished; what they have in the pool would be lost.")
    if device.channel is not None:
        raise Unsupported("prompts cannot be taken for computed in an engine of several processes.")
    work = owner.begin()
    work.settle()
    work.cache.reset()
    device.pool.run(_jitted_noise(device.pool.sharding))
    longest = work.cache.config.max_step_tokens or _MOST_TOKENS
    for index, prompt in enumerate(prompts):
        name = f"noise {index}"
        first = work.cache.add(name, prompt)
        while first < len(prompt):
            count = min(len(prompt) - first, longest)
            work.cache.retire(work.cache.step([(name, count)]).step_id)
            first += count
        work.cache.finish(name)
    owner.end(work)


@functools.lru_cache(maxsize=8)
def _jitted_noise(sharding: NamedSharding | None) -> Any:
    return jax.jit(_noise, donate_argnums=0, keep_unused=True, out_shardings=(None, sharding))


def _noise(kv_caches: _Caches) -> tuple[None, _Caches]:
    # Layers of a shape have the same noise, in memory of their own.
    made = {(each.shape, each.dtype): _made(each) for each in kv_caches}
    return None, tuple(_repeated(made[each.shape, each.dtype], each.shape[0]) for each in kv_caches)


def _made(cache: jax.Array) -> jax.Array:
    key, shape = jax.random.key(0), (min(_PERIOD, cache.shape[0]), *cache.shape[1:])
    if jnp.issubdtype(cache.dtype, jnp.floating):
        return jax.random.normal(key, shape).astype(cache.dtype)
    # Codes, and packed rows: no byte of which is a NaN, whatever is read into it.
    return jax.random.randint(key, shape, 0, 64).astype(cache.dtype)


def _repeated(some: jax.Array, num_blocks: int) -> jax.Array:
    times = math.ceil(num_blocks / some.shape[0])
    return jnp.tile(some, (times, *[1] * (some.ndim - 1)))[:num_blocks]
