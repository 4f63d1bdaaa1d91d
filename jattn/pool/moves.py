"""The operations of a step on whole blocks and state slots, as a pool reads them from the allocator's record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockMoves(Protocol):
    """A step's operations on whole blocks and state slots, as `torch_core.cache.CommittedStep` describes them."""

    @property
    def blocks_to_scrub(self) -> Sequence[int]: ...
    @property
    def swaps(self) -> Sequence[Any]: ...
    @property
    def copies(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def slots_to_scrub(self) -> Sequence[int]: ...
    @property
    def state_swaps(self) -> Sequence[Any]: ...
    @property
    def state_copies(self) -> Sequence[tuple[int, ...]]: ...


class SwapExecutor(Protocol):
    """Executes swaps between this pool and host memory: `jattn.pool.HostBlocks`."""

    def execute(self, swaps: Sequence[Any], state_swaps: Sequence[Any] = ()) -> None: ...
