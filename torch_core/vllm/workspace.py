"""Scratch memory that outlives a step: one buffer that grows until it is locked, so that a graph finds it again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput

__all__ = ["WorkspaceManager"]

_ALIGNMENT = 256


class WorkspaceManager:
    """One buffer for scratch that is not needed after a call. Names follow vLLM's class of this name.

    Give one to the layers and builders of a device that run one after the other; nothing is looked up globally.

    Args:
        device: device of the memory.

    Example:
        >>> workspace = WorkspaceManager("cpu")
        >>> partial, maxima = workspace.get_simultaneous(((2, 3), torch.float32), ((5,), torch.int32))
        >>> workspace.lock()
        >>> partial.shape, maxima.data_ptr() - partial.data_ptr(), workspace.num_bytes
        (torch.Size([2, 3]), 256, 512)
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._locked = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.numel()

    @property
    def is_locked(self) -> bool:
        """The buffer will not grow any more."""
        return self._locked

    def lock(self) -> None:
        """Forbids growth: captured graphs read and write this buffer from now on."""
        self._locked = True

    def get_simultaneous(self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Returns tensors that do not overlap; tensors of an earlier call may be overwritten.

        Args:
            *shapes_and_dtypes: shape and dtype of each tensor.

        Raises:
            InvalidInput: the buffer is locked and too small; it is as it was.
        """
        starts, end = [], 0
        for shape, dtype in shapes_and_dtypes:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if end > self.num_bytes:
            if self._locked:
                raise InvalidInput(
                    f"the workspace is locked with {self.num_bytes:,} bytes and a call needs {end:,}; reserve for the "
                    "largest batch before locking it."
                )
            self._buffer = torch.empty(end, dtype=torch.uint8, device=self.device)
        return [
            self._buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, shapes_and_dtypes, strict=True)
        ]
