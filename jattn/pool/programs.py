"""The programs that move whole blocks: each consumes the cache arrays and returns them, updated in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jattn.bridge import native, partitioned, run
from torch_core.cache_writes.call import CopyCall

_Caches = tuple[jax.Array, ...]


def copy_program(device: jax.Device, pairs: np.ndarray):  # pyright: ignore[reportInvalidTypeForm]
    """Returns the program that copies blocks, and its pairs int32[copies, 2] of source and target, padded.

    On CUDA that is the torch core's kernel, which touches the copied blocks only and runs its copies in no order; it is
    not for a block that is read by one copy and written by another.
    """
    (plain, null), *best = copy_programs(device)
    program, fill = best[0] if best and not np.isin(pairs[:, 1], pairs[:, 0]).any() else (plain, null)
    return program, pad_blocks(pairs, fill=fill)


def copy_programs(device: jax.Device):  # pyright: ignore[reportInvalidTypeForm]
    """Returns the functions that copy blocks, each with the id of a pair that changes nothing; the first serves all."""
    if device.platform == "gpu" and native.why_not() is None:
        return [(copy_blocks, 0), (copy_blocks_native, -1)]
    return [(copy_blocks, 0)]


def pad_blocks(blocks: np.ndarray, *, fill: int = 0) -> np.ndarray:
    """Pads a list of blocks to a power of two, so that a handful of programs serve every number of them.

    By default this is the null block, whose content is never read.
    """
    size = padded_sizes(max(len(blocks), 1))[-1]
    return np.pad(blocks, ((0, size - len(blocks)), *((0, 0),) * (blocks.ndim - 1)), constant_values=fill)


def padded_sizes(most: int) -> list[int]:
    """Returns the numbers of blocks that lists of up to `most` are padded to."""
    return [1 << exponent for exponent in range((most - 1).bit_length() + 1)] if most else []


def given_from_the_host(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program for ids and contents in the host's memory, also under a caller's guard of transfers."""

    def run(*operands: Any) -> Any:
        with jax.transfer_guard("allow"):
            return program(*operands)

    return run


@functools.cache
def on_parts(program: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    """Returns the program for caches whose blocks are split: each device copies the blocks of its own part.

    Blocks that are read are summed over the devices, as bits: one all-reduce of their bytes, and no other collective.
    """
    axes, *others = sharding.spec
    contents = PartitionSpec(None, *others)
    reads = program is read_blocks

    def part(kv_caches: _Caches, ids: jax.Array, *new: Any) -> Any:
        num_blocks = kv_caches[0].shape[0]
        local = ids - jax.lax.axis_index(axes) * num_blocks
        own = (local >= 0) & (local < num_blocks)
        # Nothing is written past the end.
        found = program(kv_caches, jnp.where(own, local, num_blocks), *new)
        return [_summed(layer, own, axes) for layer in found] if reads else found

    mapped = jax.shard_map(
        part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec(), *[contents] * (program is write_blocks)),
        out_specs=contents if reads else (None, sharding.spec),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=() if reads else 0)


@functools.partial(jax.jit, donate_argnums=0)
def copy_blocks(kv_caches: _Caches, pairs: jax.Array) -> tuple[None, _Caches]:
    """Copies blocks in plain jnp; every source is read before any target is written."""
    return None, tuple(_stored(cache, pairs[:, 1], _found(cache, pairs[:, 0])) for cache in kv_caches)


@functools.partial(jax.jit, donate_argnums=0)
def copy_blocks_native(kv_caches: _Caches, pairs: jax.Array) -> tuple[None, _Caches]:
    """Copies blocks by the torch core's kernel; a negative id copies nothing."""
    return None, tuple(
        run(CopyCall(kv_cache=cache, block_mapping=pairs), partitioned(native.run_native))["kv_cache"]
        for cache in kv_caches
    )


@functools.partial(jax.jit, donate_argnums=0)
def scrub_blocks(kv_caches: _Caches, blocks: jax.Array) -> tuple[None, _Caches]:
    """Fills blocks with zeros."""
    return None, tuple(_stored(cache, blocks, 0) for cache in kv_caches)


@functools.partial(jax.jit, donate_argnums=0)
def write_blocks(kv_caches: _Caches, blocks: jax.Array, contents: list[jax.Array]) -> tuple[None, _Caches]:
    """Writes blocks from arrays, one for each layer."""
    return None, tuple(_stored(cache, blocks, new) for cache, new in zip(kv_caches, contents, strict=True))


@jax.jit
def read_blocks(kv_caches: _Caches, blocks: jax.Array) -> list[jax.Array]:
    """Gathers blocks of each layer."""
    return [_found(cache, blocks) for cache in kv_caches]


def _found(cache: jax.Array, blocks: jax.Array) -> jax.Array:
    # Along Explicit axes JAX wants to be told where blocks go of an axis that one device has alone.
    sharding = jax.typeof(cache).sharding
    explicit = sharding.update(spec=PartitionSpec(None, *sharding.spec[1:])) if sharding.mesh.explicit_axes else None
    return cache.at[blocks].get(out_sharding=explicit)


def _stored(cache: jax.Array, blocks: jax.Array, new: jax.Array | int) -> jax.Array:
    # Along Explicit axes JAX 0.12 wants to be told that the result lies as the cache does.
    sharding = jax.typeof(cache).sharding
    return cache.at[blocks].set(new, out_sharding=sharding if sharding.mesh.explicit_axes else None)


def _summed(blocks: jax.Array, own: jax.Array, axes: Any) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(blocks, f"uint{8 * blocks.dtype.itemsize}")
    bits = jax.lax.psum(jnp.where(own.reshape(-1, *[1] * (blocks.ndim - 1)), bits, 0), axes)
    return jax.lax.bitcast_convert_type(bits, blocks.dtype)
