"""Which adapter each slot of the device's memory holds: loaded, kept and replaced as requests come. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jattn.llm.engine.request.lora import LoadedAdapter
from torch_core.base.errors import CacheCorruption


class AdapterSlots:
    """Finds a slot for the adapter of each request that starts; the adapter that was unused for longest gives way.

    An adapter of a running request keeps its slot. A pinned one gives way only if all others are in use, to a request
    that was there before it was pinned. Not thread-safe; the engine's thread owns it. It outlives the
    scheduler, as the memory does.

    Args:
        num_slots: number of slots.
        load: uploads an adapter to a slot; steps that were dispatched before read the old one.

    Attributes:
        num_loads: number of uploads so far.
    """

    def __init__(self, num_slots: int, load: Callable[[int, LoadedAdapter], None]) -> None:
        self._contents: list[LoadedAdapter | None] = [None] * num_slots
        self._load = load
        self._in_use: set[int] = set()
        self._used_at = [0] * num_slots
        self._clock = self.num_loads = 0

    def begin(self, running: Iterable[LoadedAdapter | None]) -> None:
        """Begins a step: adapters of these running requests keep their slots."""
        adapters = {adapter for adapter in running if adapter is not None}
        self._in_use = {slot for slot, adapter in enumerate(self._contents) if adapter in adapters}
        if len(self._in_use) != len(adapters):
            names = sorted(adapter.name for adapter in adapters)
            raise CacheCorruption(f"running requests have adapters {names}, in slots {sorted(self._in_use)}.")

    def take(self, adapter: LoadedAdapter | None) -> bool:
        """Returns whether a request with this adapter can run in the step; loads the adapter if necessary."""
        if adapter is None:
            return True
        if adapter not in self._contents:
            free = [slot for slot in range(len(self._contents)) if slot not in self._in_use]
            if not free:
                return False
            slot = min(free, key=self._worth)
            self._contents[slot] = None
            self._load(slot, adapter)
            self._contents[slot] = adapter
            self.num_loads += 1
        slot = self._contents.index(adapter)
        self._clock += 1
        self._used_at[slot] = self._clock
        self._in_use.add(slot)
        return True

    def _worth(self, slot: int) -> tuple[bool, bool, int]:
        held = self._contents[slot]
        return held is not None and held.is_pinned, held is not None, self._used_at[slot]

    def slot_of(self, adapter: LoadedAdapter) -> int:
        """Returns the slot of an adapter of a running request."""
        return self._contents.index(adapter)
