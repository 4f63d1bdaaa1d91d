"""What a pool refuses: splits over a mesh that it cannot have, and settings of JAX under which it would be copied."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding

from torch_core.checks import shown
from torch_core.errors import InvalidInput, Unsupported

__all__ = ["DROP_VIEWS", "check_donation", "check_place", "checked_split", "refuse_foreign_views"]

#: What helps where an array has a view that the pool did not give.
DROP_VIEWS = "drop every torch or numpy view of the arrays first"


def check_donation() -> None:
    """Refuses settings of JAX under which nothing is donated.

    Raises:
        Unsupported: one is on; the message names it.
    """
    config: Any = jax.config
    settings = {
        "jax_disable_jit": config.jax_disable_jit,
        "jax_debug_nans": config.jax_debug_nans,
        "jax_debug_infs": config.jax_debug_infs,
    }
    if any(settings.values()):
        on = " and ".join(name for name, value in settings.items() if value)
        raise Unsupported(
            f"{on} is on: JAX donates no buffer then, and a step would copy the whole pool. Switch it off around the "
            "step, as in: with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False)."
        )


def refuse_foreign_views(error: Exception) -> None:
    """Names what XLA's client for GPUs refuses: it donates no memory that somebody else has a view of.

    Raises:
        InvalidInput: the error says so. Nothing ran.
    """
    if "external reference" in str(error):
        raise InvalidInput(
            f"an array of kv_caches has a view that as_torch() did not give, so XLA cannot update it in place: "
            f"{DROP_VIEWS}. The pool still holds what it held."
        ) from error


def check_place(device: object) -> None:
    """Refuses what is no place for arrays.

    Raises:
        InvalidInput: it is neither a device nor a sharding.
    """
    is_place = device is None or isinstance(device, jax.sharding.Sharding) or hasattr(device, "memory_stats")
    if not is_place:
        raise InvalidInput(
            f"device is {shown(device)}; it must be one of jax.devices(), a NamedSharding(mesh, PartitionSpec(None, "
            "None, None, 'tp')) for a mesh, or None."
        )


def checked_split(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns how cache arrays of a shape are spread over a mesh.

    Raises:
        InvalidInput: a split that no pool has.
    """
    # A spec with more entries than the cache has axes is an IndexError of JAX's.
    with contextlib.suppress(ValueError, IndexError):
        local = sharding.shard_shape(shape)
        whole = local if len(shape) == 3 else (shape[0], *local[1:3], shape[3], *local[4:])
        if isinstance(sharding, NamedSharding) and whole == shape:
            return sharding
    if len(shape) == 3:
        raise InvalidInput(
            f"device is {sharding}; all heads share a pool of latents: give a NamedSharding(mesh, PartitionSpec()), by "
            "which every device has all of it."
        )
    raise InvalidInput(
        f"device is {sharding}; a pool of {shape[0]} blocks and {shape[3]} key/value heads takes a NamedSharding that "
        "splits axes 0 and 3 alone, blocks and heads, into equal parts: NamedSharding(mesh, PartitionSpec('dp', None, "
        "None, 'tp'))."
    )
