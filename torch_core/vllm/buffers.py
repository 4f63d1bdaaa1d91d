"""Device memory that outlives a step: its inputs, uploaded in one copy, and scratch that can be locked for graphs."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.metadata import CommonAttentionMetadata, PackedLayout

#: The arrays of a step that cross attention adds.
ENCODER_FIELDS = ("encoder_seq_lens", "cross_block_tables", "cross_slot_mapping")
_ALIGNMENT = 256
_FIELDS = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "positions")


def upload(metadata: CommonAttentionMetadata, device: torch.device | str) -> dict[str, Tensor]:
    """Returns the arrays of a step as int32 tensors on `device`, by name.

    One copy when the metadata has its packed buffer (the tensors are views of its image), one for each array
    otherwise (derived metadata: `unpadded`, virtual batches). On the CPU the tensors are a copy too, so that the host
    buffer may be used again.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> upload(build_common_metadata([SequenceRow([3], 0, 2)], block_size=4, num_blocks=8), "cpu")["slot_mapping"]
        tensor([12, 13], dtype=torch.int32)
    """
    check_common("metadata", metadata)
    if metadata.packed is not None and metadata.layout is not None:
        return metadata.layout.unpack(_copied(metadata.packed, device))
    arrays = {name: _copied(getattr(metadata, name), device) for name in _FIELDS}
    if metadata.encoder is not None:
        arrays.update({name: _copied(getattr(metadata.encoder, name), device) for name in ENCODER_FIELDS})
    if metadata.state_slots is not None:
        arrays["state_slots"] = _copied(metadata.state_slots, device)
    return arrays


def check_common(name: str, common: object) -> None:
    """Raises InvalidInput for what is no batch."""
    if not isinstance(common, CommonAttentionMetadata):
        raise InvalidInput(name, f"is a {type(common).__name__}", "build it with build_common_metadata")


class StepBuffers:
    """Device tensors that keep their addresses from step to step, for CUDA graphs, and the host buffers to fill them.

    A step takes a host buffer, builds its metadata into it, and uploads it: one asynchronous copy from pinned memory,
    which reads its source after the call returned. So a host buffer is handed out again only after its copy
    (TensorRT-LLM issue 15546); the device buffer is overwritten in stream order, so work of the step before that was
    launched on the same stream has read it by then.

    Args:
        layout: the fields of the step.
        device: device of the tensors.
        depth: host buffers; steps that the host may be ahead of the device.

    Attributes:
        layout: the given layout.
        arrays: the device tensors by name; valid as long as this object.
    """

    def __init__(self, layout: PackedLayout, device: torch.device | str, *, depth: int = 2) -> None:
        check_int("depth", depth, 1)
        self.layout = layout
        self._device_buffer = torch.zeros(layout.num_elements, dtype=torch.int32, device=device)
        self.arrays: dict[str, Tensor] = layout.unpack(self._device_buffer)
        self._on_cuda = self._device_buffer.device.type == "cuda"
        pinned = [torch.zeros(layout.num_elements, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(depth)]
        self._free = [(tensor, tensor.numpy()) for tensor in pinned]
        self._taken: dict[int, tuple[Tensor, np.ndarray]] = {}
        self._copies: dict[int, tuple[tuple[Tensor, np.ndarray], torch.cuda.Event | None]] = {}

    def host_buffer(self, step: int) -> np.ndarray:
        """Returns the int32 buffer of `step` to build its metadata in; waits for an earlier copy if it must.

        Raises:
            InvalidInput: the step has one already, or earlier steps took theirs and were never uploaded.
        """
        if step in self._taken or step in self._copies:
            wanted = "it has a host buffer: steps in flight need different numbers"
            raise InvalidInput("step", value=step, wanted=wanted)
        if not self._free and self._copies:
            buffer, event = self._copies.pop(min(self._copies))
            if event is not None:
                event.synchronize()
            self._free.append(buffer)
        if not self._free:
            wanted = (
                f"all {len(self._taken)} host buffers are taken (oldest step {min(self._taken)}): upload one, or give "
                "more depth"
            )
            raise InvalidInput("step", value=step, wanted=wanted)
        self._taken[step] = self._free.pop(0)
        return self._taken[step][1]

    def upload(self, step: int) -> dict[str, Tensor]:
        """Copies the buffer of `step` to the device, and returns `arrays`, which hold that step from now on.

        Raises:
            InvalidInput: the step took no buffer.
        """
        if step not in self._taken:
            wanted = f"it took no host buffer: build into host_buffer({step}) first"
            raise InvalidInput("step", value=step, wanted=wanted)
        buffer = self._taken.pop(step)
        self._device_buffer.copy_(buffer[0], non_blocking=True)
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device_buffer.device))
        self._copies[step] = buffer, event
        return self.arrays


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
                problem = f"need {end:,} bytes and the workspace is locked with {self.num_bytes:,}"
                wanted = "reserve for the largest batch before locking it"
                raise InvalidInput("shapes_and_dtypes", problem, wanted)
            self._buffer = torch.empty(end, dtype=torch.uint8, device=self.device)
        return [
            self._buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, shapes_and_dtypes, strict=True)
        ]


def _copied(array: np.ndarray, device: torch.device | str) -> Tensor:
    # A read-only array must not be wrapped; copying a small one is cheaper than explaining the warning.
    source = torch.from_numpy(array if array.flags.writeable else array.copy())
    return source.clone() if torch.device(device).type == "cpu" else source.to(device)
