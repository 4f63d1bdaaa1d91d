"""Checks of a pool: block ids, splits that it does not support, settings of JAX, steps that fail."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jattn.bridge import original_error
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, PoolLost, Unsupported
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec, StateCacheSpec

#: The fix for an array with a view that the pool did not create.
DROP_VIEWS = "drop every torch or numpy view of the arrays first"


def check_made_of(specs: tuple[Any, ...], device: Any) -> None:
    """Refuses values that are no layout of a layer, or no place for arrays."""
    for spec in specs:
        if not isinstance(spec, (KVCacheSpec, LatentCacheSpec)):
            raise InvalidInput("spec", value=spec, wanted="it must be a KVCacheSpec or a LatentCacheSpec")
    if not (device is None or isinstance(device, jax.sharding.Sharding) or hasattr(device, "memory_stats")):
        wanted = (
            "it must be one of jax.devices(), a NamedSharding(mesh, PartitionSpec(None, None, "
            "None, 'tp')) for a mesh, or None"
        )
        raise InvalidInput("device", value=device, wanted=wanted)


def check_states(states: Sequence[StateCacheSpec], num_slots: int, device: Any) -> tuple[StateCacheSpec, ...]:
    """Returns the layouts of layers with a state; refuses other values, and sizes and devices that do not fit them."""
    for index, spec in enumerate(states):
        if not isinstance(spec, StateCacheSpec):
            raise InvalidInput(f"states[{index}]", value=spec, wanted="it must be a StateCacheSpec")
    if not states and num_slots:
        raise InvalidInput("num_slots", f"is {num_slots} and states is empty", "give both or neither")
    if states:
        check_int("num_slots", num_slots, 2)
        if isinstance(device, NamedSharding) and len(device.spec) and device.spec[0] is not None:
            raise Unsupported("device", value=device, wanted="a pool with states does not split its blocks")
    return tuple(states)


def state_shardings(
    sharding: NamedSharding, states: Sequence[StateCacheSpec], axis: str | None
) -> Iterator[NamedSharding]:
    """Yields how each array of states is spread over the mesh of a pool.

    Args:
        sharding: that of the blocks.
        states: layouts of the layers.
        axis: the mesh axis that splits them along their `split_axes`; None for all of them on every device.

    Raises:
        InvalidInput: the mesh lacks the axis, or its devices do not divide an array.
    """
    if axis is not None and axis not in sharding.mesh.shape:
        raise InvalidInput("state_axis", value=axis, wanted=f"the mesh has {', '.join(sharding.mesh.shape)}")
    for spec in states:
        split = spec.split_axes if axis is not None and spec.split_axes else (None,) * len(spec.shapes)
        for shape, place in zip(spec.shapes, split, strict=True):
            if place is not None and shape[place] % sharding.mesh.shape[axis]:
                wanted = f"{sharding.mesh.shape[axis]} devices split axis {place}, so that they must divide it"
                raise InvalidInput("states", f"have an array of {shape}", wanted)
            axes = () if place is None else (*[None] * (place + 1), axis)
            yield NamedSharding(sharding.mesh, PartitionSpec(*axes))


def checked_blocks(name: str, blocks: Any, num_blocks: int, *, pairs: bool = False, noun: str = "block") -> np.ndarray:
    """Returns ids of blocks, or of state slots, as int32[len(blocks)] or int32[len(blocks), 2].

    numpy alone would convert 1.5, and 2**32 + 1, to the id of another block.
    """
    try:
        found = np.asarray(blocks)
    except ValueError:
        # Of rows of several lengths.
        found = np.array(None)
    if found.ndim and not len(found):
        return np.zeros((0, 2) if pairs else 0, np.int32)
    if found.dtype.kind not in "iu" or found.shape[1:] != (2,) * pairs or not found.ndim:
        wanted = f"pairs of {noun} ids, (source, target)" if pairs else f"a flat sequence of {noun} ids, which are ints"
        raise InvalidInput(name, value=blocks, wanted=f"it must be {wanted}")
    bad = np.flatnonzero(((found < 0) | (found >= num_blocks)).reshape(len(found), -1).any(1))
    if bad.size:
        first = found[bad[0]].tolist()
        wanted = f"valid ids are 0 to {num_blocks - 1}"
        raise InvalidInput(f"{name}[{int(bad[0])}]", value=tuple(first) if pairs else first, wanted=wanted)
    return found.astype(np.int32)


def refuse_repeated(name: str, written: np.ndarray, *, noun: str = "block") -> None:
    """Refuses blocks that are written twice, except the null block, whose content is never used."""
    times = np.bincount(written)
    times[:1] = 0
    if times.size and times.max() > 1:
        block = int(times.argmax())
        first, second = np.flatnonzero(written == block)[:2].tolist()
        wanted = f"name each {noun} once"
        raise InvalidInput(f"{name}[{first}]", f"and {name}[{second}] both write {noun} {block}", wanted)


def check_donation() -> None:
    """Refuses settings of JAX under which nothing is donated."""
    on = [name for name in ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs") if getattr(jax.config, name)]
    if on:
        raise Unsupported(
            f"{' and '.join(on)} is on: JAX donates no buffer then, and a step would copy the whole pool. Switch it "
            "off around the step, as in: with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False)."
        )


def are_arrays(values: Sequence[Any], usual: type[jax.Array]) -> bool:
    """Returns whether all values are JAX arrays.

    Args:
        values: any.
        usual: their type in nearly every step: to compare it takes an eighth of the time of `isinstance` by jax.Array.
    """
    return list(map(type, values)).count(usual) == len(values) or all(isinstance(value, jax.Array) for value in values)


def refuse_foreign_views(error: Exception) -> None:
    """Names the array that XLA's GPU client refuses: it does not donate memory with another view."""
    if "external reference" in str(error):
        raise InvalidInput(
            f"an array of kv_caches has a view that as_torch() did not give, so XLA cannot update it in place: "
            f"{DROP_VIEWS}. The pool still holds what it held."
        ) from error


def checked_split(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns how cache arrays of a shape are spread over a mesh."""
    # A spec with more entries than the cache has axes is an IndexError of JAX's.
    with contextlib.suppress(ValueError, IndexError):
        local = sharding.shard_shape(shape)
        whole = local if len(shape) == 3 else (shape[0], *local[1:3], shape[3], *local[4:])
        if isinstance(sharding, NamedSharding) and whole == shape:
            return sharding
    if len(shape) == 3:
        wanted = (
            "all heads share a pool of latents: give a NamedSharding(mesh, PartitionSpec()), by "
            "which every device has all of it"
        )
        raise InvalidInput("device", f"is {sharding}", wanted)
    wanted = (
        f"a pool of {shape[0]} blocks and {shape[3]} key/value heads takes a NamedSharding "
        "that splits axes 0 and 3 alone, blocks and heads, into equal parts: "
        "NamedSharding(mesh, PartitionSpec('dp', None, None, 'tp'))"
    )
    raise InvalidInput("device", f"is {sharding}", wanted)


def is_placed(array: jax.Array, sharding: NamedSharding | None) -> bool:
    """Returns whether an array lies as a sharding says; None is any place."""
    return sharding is None or array.sharding.is_equivalent_to(sharding, array.ndim)


def local_bytes(layer: tuple[tuple[int, ...], np.dtype], sharding: NamedSharding | None) -> int:
    """Returns the bytes of an array, given its shape and dtype, on one device."""
    shape, dtype = layer
    return math.prod(shape if sharding is None else sharding.shard_shape(shape)) * dtype.itemsize


class _Pool(Protocol):
    @property
    def generation(self) -> int: ...

    @property
    def is_closed(self) -> bool: ...

    def is_lost(self) -> bool: ...

    def renew(self) -> None: ...


class Guard:
    """The context manager of `KVPool.guard`, no generator for the reason that `jattn.bridge.typed_errors` has."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is None:
            return
        original = original_error(error)
        try:
            # A closed pool was lost to no step.
            if not self._pool.is_closed and self._pool.is_lost():
                lost = self._pool.generation
                self._pool.renew()
                if isinstance(original, Exception):
                    raise PoolLost(
                        f"a step failed after it had consumed the KV pool of generation {lost} "
                        f"({type(original).__name__}: {original}). The pool is now generation "
                        f"{self._pool.generation} and empty: compute every sequence again.",
                        generation=lost,
                    ) from original
            if original is not error:
                raise original from None
        finally:
            del self._pool, original, error, frames
