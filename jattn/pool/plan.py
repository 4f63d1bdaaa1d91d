"""The number of blocks that a budget holds, computed and printable before any allocation."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, OutOfMemory, Unsupported
from torch_core.base.specs import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The size of a pool.

    Attributes:
        spec: one layer's cache.
        num_layers: cache arrays.
        num_blocks: blocks of each, the null block included.
        further: layouts of the layers after those; see `KVPool`.
        group_block_sizes: tokens of a block in each cache group that draws on the blocks, for layers of its own in the
            same arrays; empty for one group.
        context_parallel_size: number of devices over which a block's tokens are distributed, `spec.block_size` on each.

    Example:
        >>> from torch_core.base.specs import KVCacheSpec
        >>> spec = KVCacheSpec(num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16")
        >>> print(PoolPlan(spec=spec, num_layers=32, num_blocks=1025))
        1,025 blocks of 16 tokens in 32 layers: room for 16,384 tokens, 2.002 GiB
    """

    spec: CacheSpec
    num_layers: int
    num_blocks: int
    further: tuple[CacheSpec, ...] = ()
    group_block_sizes: tuple[int, ...] = ()
    context_parallel_size: int = 1

    @property
    def num_groups(self) -> int:
        """Number of cache groups."""
        return max(len(self.group_block_sizes), 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool can hold in all groups; the null block holds none, and a window gives blocks back."""
        own = self.spec.block_size * self.context_parallel_size
        share = sum(Fraction(own, size) for size in self.group_block_sizes or (own,))
        return int((self.num_blocks - 1) / share) * own

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers together."""
        return self.num_blocks * _bytes_per_block(self.spec, self.num_layers, self.further)

    def __str__(self) -> str:
        num_layers = self.num_layers + len(self.further)
        groups = f" of each of {self.num_groups} groups" if self.num_groups > 1 else ""
        return (
            f"{self.num_blocks:,} blocks of {self.spec.block_size * self.context_parallel_size} tokens in {num_layers} "
            f"layers{groups}: "
            f"room for {self.num_tokens:,} tokens, {self.num_bytes / 2**30:.3f} GiB"
        )


def plan_pool(
    spec: CacheSpec,
    *,
    num_layers: int,
    num_bytes: int | None = None,
    memory_fraction: float | None = None,
    min_tokens: int = 1,
    min_blocks: int | None = None,
    further: Sequence[CacheSpec] = (),
    device: Any = None,
) -> PoolPlan:
    """Plans the largest pool within a budget; allocates nothing.

    Args:
        spec: one layer's cache.
        num_layers: cache arrays.
        num_bytes: the budget in bytes; or
        memory_fraction: the share, above 0 and at most 1, of the memory that JAX may use on `device` and that is free
            now. JAX itself takes a part of the device only; see XLA_CLIENT_MEM_FRACTION.
        min_tokens: tokens of one sequence that must fit.
        min_blocks: blocks that they need; by default those of a sequence that keeps all of them, in one group.
        further: layouts of the layers after those; see `KVPool`.
        device: JAX's default device if None.

    Raises:
        InvalidInput: not exactly one budget, a budget out of range, or one that does not hold `min_tokens`.
        Unsupported: the device does not report its memory (a CPU does not); give `num_bytes`.

    Example:
        >>> from torch_core.base.specs import KVCacheSpec
        >>> spec = KVCacheSpec(num_kv_heads=2, head_size=32, block_size=16, dtype="float32")
        >>> plan_pool(spec, num_layers=4, num_bytes=1 << 20).num_blocks
        32
    """
    check_int("num_layers", num_layers, 1)
    if (num_bytes is None) == (memory_fraction is None):
        raise InvalidInput("give exactly one of num_bytes and memory_fraction.")
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise InvalidInput("memory_fraction", value=memory_fraction, wanted="it must be above 0 and at most 1")
    if num_bytes is None:
        num_bytes = int(free_bytes(_device(device)) * (memory_fraction or 0))
    needed = 1 + (-(-min_tokens // spec.block_size) if min_blocks is None else min_blocks)
    per_block = _bytes_per_block(spec, num_layers, further)
    num_blocks = num_bytes // per_block
    if num_blocks < needed:
        raise InvalidInput(
            f"the budget of {num_bytes:,} bytes holds {num_blocks} blocks; a sequence of {min_tokens:,} tokens needs "
            f"{needed - 1} and the null block ({needed * per_block:,} bytes). Raise the budget (of an "
            "engine, kv_cache_bytes), or let sequences be shorter (min_tokens; of an engine, max_model_len)."
        )
    return PoolPlan(spec=spec, num_layers=num_layers, num_blocks=num_blocks, further=tuple(further))


def check_room(num_bytes: int, device: Any = None) -> None:
    """Refuses sizes that do not fit the device's memory, before its allocator tries for minutes.

    A device that does not report its memory, as a CPU does not, is taken to have this machine's memory free.

    Args:
        num_bytes: number of bytes to allocate.
        device: JAX's default device if None.

    Raises:
        OutOfMemory: the message has the needed bytes, the free bytes, and the holders of the rest.
    """
    device = _device(device)
    if num_bytes <= _room(device):
        return
    # Arrays that only a reference cycle holds are unused.
    gc.collect()
    room = _room(device)
    if num_bytes > room:
        raise OutOfMemory(
            f"{num_bytes:,} bytes are needed and {room:,} are free on {device}; {_holders(device)}. Close or drop "
            "what is not needed any more, or ask for fewer blocks."
        )


def free_bytes(device: Any) -> int:
    """Returns the bytes that JAX may use on a device and that are free now.

    Raises:
        Unsupported: the device does not report its memory; a CPU does not.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise Unsupported("device", f"{device} does not report its memory", "give num_bytes instead of memory_fraction")
    return stats["bytes_limit"] - stats["bytes_in_use"]


def host_memory() -> int:
    """Returns the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_per_block(spec: CacheSpec, num_layers: int, further: Sequence[CacheSpec]) -> int:
    return num_layers * spec.bytes_per_block + sum(each.bytes_per_block for each in further)


def _device(device: Any) -> Any:
    return jax.devices()[0] if device is None else device


def _room(device: Any) -> int:
    try:
        return free_bytes(device)
    except Unsupported:
        return host_memory()


def _holders(device: Any) -> str:
    held: Counter[str] = Counter()
    for array in jax.live_arrays():
        if not array.is_deleted() and array.is_fully_addressable and device in array.devices():
            held[f"{array.dtype.name}{list(array.shape)}"] += array.nbytes
    most = [f"{count:,} in arrays of {kind}" for kind, count in held.most_common(3)]
    return f"this process's JAX arrays hold {held.total():,} there" + "".join(f", {text}" for text in most)
