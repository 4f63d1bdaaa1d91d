"""Host buffers for uploads that may still be running: one per step in flight, never written twice at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.metadata.layout import PackedLayout

__all__ = ["StagingRing"]


class StagingRing:
    """A ring of packed host buffers.

    An asynchronous copy reads its source after the call returned. Reusing one buffer for every step therefore sends
    another step's tables (TensorRT-LLM issue 15546). The ring hands a buffer out only when the step that used it last
    has been retired; the caller retires a step when its copy is known to be done.

    Args:
        layout: what each buffer holds.
        depth: steps in flight.
        buffers: the buffers to use, for instance numpy views of pinned torch tensors; None makes plain ones.

    Raises:
        InvalidInput: `depth` is not positive, or the buffers do not match the layout, or overlap.

    Example:
        >>> from torch_core.metadata import metadata_layout
        >>> ring = StagingRing(metadata_layout(num_seqs=1, num_tokens=1, max_blocks=1), depth=2)
        >>> first, second = ring.acquire(0), ring.acquire(1)
        >>> ring.retire(0)
        >>> ring.acquire(2) is first
        True
    """

    def __init__(self, layout: PackedLayout, *, depth: int = 2, buffers: Sequence[np.ndarray] | None = None) -> None:
        if depth < 1:
            raise InvalidInput(f"depth is {depth}; it must be at least 1.")
        if buffers is None:
            buffers = [np.zeros(layout.num_elements, np.int32) for _ in range(depth)]
        if len(buffers) != depth:
            raise InvalidInput(f"buffers has {len(buffers)} entries; depth is {depth}.")
        for index, buffer in enumerate(buffers):
            layout.check_buffer(buffer)
            if any(np.shares_memory(buffer, other) for other in buffers[:index]):
                raise InvalidInput(f"buffers[{index}] shares memory with an earlier one; each step needs its own.")
        self.layout = layout
        self._free = list(buffers)
        self._in_flight: dict[int, np.ndarray] = {}

    def acquire(self, step: int) -> np.ndarray:
        """Returns a buffer that belongs to `step` until `retire(step)`; its contents are whatever they were.

        Raises:
            InvalidInput: the step has one already, or all buffers are in flight.
        """
        if step in self._in_flight:
            raise InvalidInput(f"Step {step} already has a staging buffer; steps in flight need different numbers.")
        if not self._free:
            raise InvalidInput(
                f"All {len(self._in_flight)} staging buffers are in flight (oldest step {min(self._in_flight)}); "
                "retire it when its copy is done, or make the ring deeper."
            )
        buffer = self._free.pop(0)
        self._in_flight[step] = buffer
        return buffer

    def retire(self, step: int) -> None:
        """Gives the buffer of `step` back.

        Raises:
            InvalidInput: the step has none.
        """
        if step not in self._in_flight:
            raise InvalidInput(f"Step {step} has no staging buffer; it was retired before or never began.")
        self._free.append(self._in_flight.pop(step))
