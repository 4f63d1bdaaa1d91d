"""run: a call on torch tensors, by the kernels' plans on CUDA and by plain torch on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.op import loaded, op_of
from torch_core.launch.serves import refuse_unserved
from torch_core.launch.tensors import array_spec, empty_results

#: Shape and element type of an array.
ShapeAndDtype: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class Workspace(Protocol):
    """A source of scratch memory, such as `torch_core.vllm.WorkspaceManager`."""

    def get_simultaneous(self, *shapes_and_dtypes: ShapeAndDtype) -> list[Tensor]: ...


def run(call: Call[Tensor], *, workspace: Workspace | None = None) -> dict[str, Tensor]:
    """Runs a call on the device of its tensors; new results are allocated, given ones written.

    On CUDA nothing is waited for and, after the first call with a shape, nothing happens but the launches: it can be
    captured in a graph. Values of index arrays are checked on the CPU only; on CUDA they are out of the host's sight.

    Args:
        call: the call.
        workspace: source of the kernels' scratch; None allocates it with the results.

    Returns:
        The results by name, `out` and `lse`, as far as the operation has them.

    Raises:
        InvalidInput: the call is inconsistent, its tensors are on several devices, or (on the CPU) hold lengths or ids
            out of range.
        Unsupported: a gradient is wanted; a device or a combination without an implementation.
    """
    arrays = call.arrays()
    device = _device(call, arrays)
    if device.type == "cuda":
        call = call.for_kernels(torch)
        # Imported here: nothing on the CPU's way imports Triton.
        return import_module("torch_core.launch.launcher").run_planned(call, call.arrays(), device, workspace)
    _check_on_cpu(call, device)
    return empty_results(call, arrays, device) if call.is_empty else run_on_cpu(call.for_kernels(torch))


def scratch_of(call: Call[ArraySpec], device: torch.device) -> list[ShapeAndDtype]:
    """Returns the scratch that `run` requests from a workspace; on a CPU, the scratch for an H200."""
    return import_module("torch_core.launch.launcher").planned_scratch(call, device)


def run_all(calls: Sequence[Call[Tensor]]) -> None:
    """Runs several calls that only write in place; on a CPU all are checked before the first one runs."""
    for call in calls:
        device = _device(call, call.arrays())
        if device.type != "cuda":
            _check_on_cpu(call, device)
    for call in calls:
        run(call)


def _check_on_cpu(call: Call[Tensor], device: torch.device) -> None:
    for name, tensor in call.arrays().items():
        if tensor.device != device:
            raise InvalidInput(name, f"is on {tensor.device} and the other tensors on {device}", "move it there")
    if device.type != "cpu":
        raise Unsupported("device", value=str(device), wanted="there are implementations for cpu and cuda only")
    _check(call.map(array_spec))
    call.check_values()


def _device(call: Call[Tensor], arrays: dict[str, Tensor]) -> torch.device:
    """Returns the device of the first tensor; all are tensors, and none wants a gradient."""
    recording = torch.is_grad_enabled()
    for name, tensor in arrays.items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, f"is a {type(tensor).__name__}", "it must be a torch tensor")
        if recording and tensor.requires_grad:
            wanted = f"call it under torch.no_grad() or pass {name}.detach()"
            raise Unsupported(name, "requires a gradient, which this operation cannot give", wanted)
    if not arrays:
        raise InvalidInput(f"{call.name}: no tensor is given.")
    return next(iter(arrays.values())).device


@lru_cache(maxsize=8192)
def _check(specs: Call[ArraySpec]) -> None:
    specs.check()
    refuse_unserved(specs, "torch")


def run_on_cpu(call: Call[Tensor]) -> dict[str, Tensor]:
    """Computes a checked call on CPU tensors; returns its results by name (`out`, `lse`), given ones included.

    They do not depend on the other sequences of a batch, on block ids, or on the content of unused slots: bit for bit,
    for a fixed number of threads.
    """
    return loaded(op_of(call).cpu)(call) or {}
