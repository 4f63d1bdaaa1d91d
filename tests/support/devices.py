"""Tests on four CPU devices: in a process of their own, because XLA counts its devices once."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

#: How a cache, and how rows of heads, are split by the mesh axis "tp".
CACHE = PartitionSpec(None, None, None, "tp")
HEADS = PartitionSpec(None, "tp")
WHOLE = PartitionSpec()

# Of several results the type is a tuple.
_COLLECTIVES = r"= (?:\([^)]*\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"


def on_four_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Makes a test run where `jax.devices()` are four; its arguments must be plain values."""

    return _on_devices(4, test)


def on_eight_devices(test: Callable[..., None]) -> Callable[..., None]:
    """The same where they are eight."""
    return _on_devices(8, test)


def mesh(kind: str, **sizes: int) -> jax.sharding.Mesh:
    """Returns a mesh of "auto" or "explicit" axes; four devices on "tp" by default."""
    sizes = sizes or {"tp": 4}
    types = (AxisType[kind.capitalize()],) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def place(array: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> jax.Array:
    """Returns an array that is split over a mesh, in memory that XLA's CPU backend can take back."""
    return jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, spec))(array)


def addresses(array: jax.Array) -> list[int]:
    """Returns the data pointer of each device's part."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def collectives(function: Any, *args: Any) -> list[str]:
    """Returns the collectives in a jitted function's compiled program."""
    return re.findall(_COLLECTIVES, function.lower(*args).compile().as_text())


def _on_devices(count: int, test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        _process(count).submit(_call, test.__module__, test.__qualname__, args, kwargs).result()

    return run


@functools.cache
def _process(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start, (count,))


def _start(count: int) -> None:
    # Before anything asks for a device. Of a flag that stands twice XLA takes the last.
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    # Not by the environment: JAX has read it, as the module of this function imports JAX.
    jax.config.update("jax_platforms", "cpu")
    # As in tests/conftest.py.
    gc.set_threshold(50_000, 20, 50)


def _call(module: str, name: str, args: Any, kwargs: Any) -> None:
    is_new = module not in sys.modules
    test = getattr(importlib.import_module(module), name).__wrapped__
    if is_new:
        gc.freeze()
    try:
        test(*args, **kwargs)
    except BaseException:
        # As text: what pytest raises does not travel between processes.
        raise AssertionError(traceback.format_exc()) from None
