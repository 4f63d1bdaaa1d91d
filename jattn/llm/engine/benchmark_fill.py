"""For benchmarks: prompts that are taken for computed, so that the steps after them can be measured alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jattn.llm.engine.core import EngineCore
from torch_core.base.errors import InvalidInput, Unsupported

# Blocks that differ; a prime, so that no size of a chunk or a table repeats with them.
_PERIOD = 1021
_MOST_TOKENS = 1 << 16
_Caches = tuple[jax.Array, ...]


def assume_computed(core: EngineCore, prompts: Sequence[Sequence[int]], salts: Sequence[bytes | None] = ()) -> None:
    """Fills the pool with random contents; the prefix cache then holds these prompts, as far as they fill blocks.

    Random contents, because a device draws less power for operands of zeros and runs faster.

    Args:
        core: core of an engine with a prefix cache; the contents of its pool are lost.
        prompts: token ids.
        salts: salt of each prompt's keys, in turns; those of the engine without any.

    Raises:
        InvalidInput: requests are unfinished.
        Unsupported: an engine of several processes.
        OutOfBlocks: the pool is too small.
    """
    device = core.device
    if core.requests:
        raise InvalidInput(f"{len(core.requests)} requests are unfinished; their blocks would be lost.")
    if device.channel is not None:
        raise Unsupported("prompts", "cannot be taken for computed in an engine of several processes")
    core.settle()
    cache = core.cache
    cache.reset()
    device.pool.run(_jitted_fill(device.pool.shardings))
    longest = cache.config.max_step_tokens or _MOST_TOKENS
    for index, prompt in enumerate(prompts):
        name = f"filled {index}"
        # One more token, which is not computed: a state is kept at the last boundary before the end.
        first = cache.add(name, [*prompt, 0], salt=salts[index % len(salts)] if salts else None)
        while first < len(prompt):
            count = min(len(prompt) - first, longest)
            cache.retire(cache.step([(name, count)]).step_id)
            first += count
        cache.finish(name)


@functools.lru_cache(maxsize=8)
def _jitted_fill(shardings: tuple[NamedSharding | None, ...]) -> Any:
    return jax.jit(_filled, donate_argnums=0, keep_unused=True, out_shardings=(None, shardings))


def _filled(kv_caches: _Caches) -> tuple[None, _Caches]:
    # Layers of a shape have the same noise, in memory of their own.
    made = {(each.shape, each.dtype): _made(each) for each in kv_caches}
    return None, tuple(_repeated(made[each.shape, each.dtype], each.shape[0]) for each in kv_caches)


def _made(cache: jax.Array) -> jax.Array:
    key, shape = jax.random.key(0), (min(_PERIOD, cache.shape[0]), *cache.shape[1:])
    if jnp.issubdtype(cache.dtype, jnp.floating):
        return jax.random.normal(key, shape).astype(cache.dtype)
    # 8-bit values, and packed rows: no byte of them is a NaN in any reading.
    return jax.random.randint(key, shape, 0, 64).astype(cache.dtype)


def _repeated(some: jax.Array, num_blocks: int) -> jax.Array:
    times = math.ceil(num_blocks / some.shape[0])
    return jnp.tile(some, (times, *[1] * (some.ndim - 1)))[:num_blocks]
