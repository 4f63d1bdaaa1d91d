"""Host memory for blocks that were swapped out, and the copies in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.pool.kv_pool import KVPool
from jattn.pool.plan import host_memory
from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.owners import Owner


class HostBlocks(Owner):
    """Whole blocks and states of a pool in host memory; the other half of `CacheManager.swap_out` and `swap_in`.

    Args:
        pool: the pool of the blocks; it must outlive this object.
        num_host_blocks: slots to allocate, as in `CacheConfig.num_host_blocks`.
        num_host_slots: slots of states to allocate, as in `StateConfig.num_host_slots`.

    Raises:
        InvalidInput: num_host_blocks is not positive, or more than this machine's memory holds.
    """

    def __init__(self, pool: KVPool, num_host_blocks: int, num_host_slots: int = 0) -> None:
        check_int("num_host_blocks", num_host_blocks, 1)
        check_int("num_host_slots", num_host_slots, 0)
        needed = num_host_blocks * sum(spec.bytes_per_block for spec in pool.specs)
        needed += num_host_slots * sum(spec.bytes_per_slot for spec in pool.states)
        memory = host_memory()
        if needed > memory:
            wanted = f"they need {needed:,} bytes and this machine has {memory:,}"
            raise InvalidInput("num_host_blocks", value=num_host_blocks, wanted=wanted)
        self._pool = pool
        self._storage = [np.zeros(spec.shape(num_host_blocks), jnp.dtype(spec.dtype)) for spec in pool.specs]
        self._states = [
            np.zeros(shape, jnp.dtype(dtype))
            for spec in pool.states
            for shape, dtype in zip(spec.array_shapes(num_host_slots), spec.dtypes, strict=True)
        ]
        self._num_host_slots = num_host_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(layer.nbytes for layer in (*self._storage, *self._states))

    def execute(self, swaps: Sequence[Any], state_swaps: Sequence[Any] = ()) -> None:
        """Copies blocks in the order of the swaps; returns when blocks for the host have arrived there.

        Args:
            swaps: the `torch_core.cache.BlockSwap`s of a committed step. Run them before the step's copies and writes.
            state_swaps: its `StateSwap`s.

        Raises:
            InvalidInput: a block or slot is out of range; nothing was copied.
        """
        pool = self._pool
        blocks = (("device_block", pool.num_blocks), ("host_block", self._storage[0].shape[0]))
        _check("swaps", swaps, blocks)
        _check("state_swaps", state_swaps, (("device_slot", pool.num_slots), ("host_slot", self._num_host_slots)))
        for swap in state_swaps:
            slots = [swap.device_slot]
            if swap.to_host:
                for storage, states in zip(self._states, pool.read_states(slots), strict=True):
                    storage[swap.host_slot] = states[0]
            else:
                pool.write_states(slots, [storage[[swap.host_slot]] for storage in self._states])
        for to_host, group in groupby(swaps, lambda swap: bool(swap.to_host)):
            run = list(group)
            device_blocks = [swap.device_block for swap in run]
            host_blocks = np.array([swap.host_block for swap in run], np.int32)
            if to_host:
                for storage, blocks in zip(self._storage, self._pool.read_blocks(device_blocks), strict=True):
                    storage[host_blocks] = blocks
            else:
                self._pool.write_blocks(device_blocks, [storage[host_blocks] for storage in self._storage])


def _check(argument: str, swaps: Sequence[Any], limits: tuple[tuple[str, int], ...]) -> None:
    for index, swap in enumerate(swaps):
        for name, limit in limits:
            value = getattr(swap, name)
            if not 0 <= value < limit:
                raise InvalidInput(
                    f"{name} of {argument}[{index}] is {value}; valid ids are 0 to {limit - 1}.",
                    argument=f"{argument}[{index}].{name}",
                )
