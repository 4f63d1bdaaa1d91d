"""Runs an OperationPlan on CUDA tensors with Triton's own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs

from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.compile import check_fits, compile_variant, kernel_variant
from torch_core.launch.plan import Absent, Descriptor, DeviceLimits, OperationPlan, Pointer, Scalar
from torch_core.launch.planner import plan_call
from torch_core.launch.serves import unserved
from torch_core.launch.tensors import array_spec, empty_results, layout_spec, torch_dtype


def run_planned(
    call: Call[torch.Tensor], arrays: dict[str, torch.Tensor], device: torch.device, workspace: Any = None
) -> dict[str, torch.Tensor]:
    """Plans a call, or finds its plan again, and runs it; see `torch_core.launch.run.run`.

    Args:
        call: the call.
        arrays: `call.arrays()`.
        device: device of the first tensor.
        workspace: see there.
    """
    found = []
    for name, value in call.__dict__.items():
        if name not in arrays:
            found.append((name, value))
            continue
        if value.device != device:
            raise _elsewhere(call.name, name, value, device)
        strides = None if value.is_contiguous() else value.stride()
        found.append((name, value.shape, value.dtype, strides, value.data_ptr() % 16 == 0))
    ready = _ready(type(call), tuple(found), device)
    if ready is None:
        return empty_results(call, arrays, device)
    buffers = dict(arrays)
    for name, shape, dtype in ready.new:
        buffers[name] = torch.empty(shape, dtype=dtype, device=device)
    if ready.scratch and workspace is not None:
        wanted = ((shape, dtype) for _, shape, dtype in ready.scratch)
        buffers.update(zip((name for name, *_ in ready.scratch), workspace.get_simultaneous(*wanted), strict=True))
    else:
        for name, shape, dtype in ready.scratch:
            buffers[name] = torch.empty(shape, dtype=dtype, device=device)
    _launch(ready.launches, buffers, device)
    return {name: buffers[name] for name in ready.results}


def planned_scratch(call: Call[ArraySpec], device: torch.device) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and element type of a call's scratch; see `torch_core.launch.run.scratch_of`."""
    limits = device_limits(device) if device.type == "cuda" else None
    return [(spec.shape, torch_dtype(spec.dtype)) for _, spec in plan_call(call, limits).scratch]


def run_operation(
    plan: OperationPlan, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Runs the launches of a plan in order on the current stream, without waiting for the device.

    Outputs and scratch that `out` lacks are allocated with `torch.empty`: under CUDA graph capture they come from the
    graph's pool. Kernels are compiled (or read from Triton's disk cache) and loaded on the first run, so a
    plan must run once before it is captured.

    Args:
        plan: made for arrays of exactly these shapes, dtypes and strides; that is the caller's duty, only alignment
            and the set of names are checked here.
        tensors: the plan's inputs by name, all on one device.
        out: outputs to fill and scratch to use, by name; contiguous.

    Returns:
        The plan's outputs by name.

    Raises:
        InvalidInput: an input is missing, an output has another shape or dtype, or an address is not aligned as the
            plan assumes.
        Unsupported: a kernel does not fit the device.
    """
    missing = [name for name, _ in plan.inputs if name not in tensors]
    if missing:
        raise InvalidInput("tensors", f"lacks the inputs {missing}", "give a tensor for each").under(plan.name)
    buffers = dict(tensors)
    device = tensors[plan.inputs[0][0]].device
    for name, spec in (*plan.outputs, *plan.scratch):
        given = None if out is None else out.get(name)
        if given is None:
            given = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        else:
            _check_output(plan.name, name, array_spec(given), spec)
        buffers[name] = given
    for name, spec in (*plan.inputs, *plan.outputs, *plan.scratch):
        _check_address(plan.name, name, buffers[name], spec, device)
    _launch(_prepared(plan, device.index), buffers, device)
    return {name: buffers[name] for name, _ in plan.outputs}


def prepare_operation(plan: OperationPlan, device: torch.device) -> None:
    """Compiles a plan's kernels and loads them onto a CUDA device, so that its first run may be a captured one.

    Raises:
        Unsupported: a kernel does not fit the device.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        _prepared(plan, device.index)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Returns the limits of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        arch=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
    )


class _Ready(NamedTuple):
    """The steps that remain for a call of known layout: arrays to allocate, launches, and the names of the results."""

    new: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    scratch: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    launches: tuple[Any, ...]
    results: tuple[str, ...]


# By one tuple of layouts and options: a call of specs would have to be made first, and is slower to hash and compare.
@lru_cache(maxsize=8192)
def _ready(call_class: type[Call[Any]], found: tuple[Any, ...], device: torch.device) -> _Ready | None:
    specs = call_class.of({name: known[0] if len(known) == 1 else layout_spec(*known) for name, *known in found})
    if specs.is_empty:
        specs.check()
        return None
    _refuse_unserved(specs)
    plan = plan_call(specs, device_limits(device))
    for name, spec in plan.outputs:
        given = getattr(specs, name, None)
        if given is not None:
            _check_output(plan.name, name, given, spec)
    given = specs.arrays()
    new, scratch = (
        tuple((name, spec.shape, torch_dtype(spec.dtype)) for name, spec in arrays if name not in given)
        for arrays in (plan.outputs, plan.scratch)
    )
    written = [name for name in specs.written if name in ("out", "lse")]
    return _Ready(new, scratch, _prepared(plan, device.index), tuple(dict.fromkeys([*dict(plan.outputs), *written])))


def _refuse_unserved(specs: Call[ArraySpec]) -> None:
    """Refuses by what there is for tensors: implementations have names in JAX."""
    specs.check()
    reason = unserved(specs, "triton")
    if reason is not None:
        fix = "tensors on a CPU are served" if unserved(specs, "torch") is None else "no implementation serves it"
        raise Unsupported(f"{specs.name}: {reason}, which the kernels for CUDA do not serve; {fix}.")


def _launch(launches: tuple[Any, ...], buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _launch(launches, buffers, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    hooked = _has_hooks()
    for compiled, run, packed, template, pointers, descriptors, grid in launches:
        arguments = list(template)
        for index, name in pointers:
            # Numbers, not tensors: for a tensor the launcher asks the driver about the address on every call.
            arguments[index] = buffers[name].data_ptr()
        for index, descriptor in descriptors:
            arguments[index] = _tensor_descriptor(descriptor, buffers[descriptor.buffer])
        if hooked:
            compiled[grid](*arguments, stream=stream)
        else:
            # The same as compiled[grid], without a closure and a record for hooks that are not set.
            run(*grid, stream, compiled.function, packed, None, None, None, *arguments)
    return None


def _has_hooks() -> bool:
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


@lru_cache(maxsize=4096)
def _prepared(plan: OperationPlan, device_index: int) -> tuple[Any, ...]:
    # One entry per device: a loaded CUDA function belongs to one context.
    limits = device_limits(torch.device("cuda", device_index))
    specs = plan.specs
    prepared = []
    for launch in plan.launches:
        compiled = compile_variant(kernel_variant(launch, specs), limits.arch)
        check_fits(launch.name, compiled.metadata.shared, limits)
        # Reading `run` loads the code onto the current device, and now, so that a later capture does not.
        with torch.cuda.device(device_index):
            run = compiled.run
        packed = compiled.packed_metadata
        if launch.room:
            # A copy: launches without room share the compiled kernel.
            warps, blocks, shared, *others = packed
            packed = (warps, blocks, max(shared, launch.room), *others)
        arguments = {**dict(launch.constexprs), **dict(launch.arguments)}
        template: list[Any] = []
        pointers, descriptors = [], []
        for index, name in enumerate(launch.kernel.arg_names):
            argument = arguments[name]
            template.append(_constant(argument))
            if isinstance(argument, Pointer):
                pointers.append((index, argument.buffer))
            elif isinstance(argument, Descriptor):
                descriptors.append((index, argument))
        grid = launch.grid + (1,) * (3 - len(launch.grid))
        prepared.append((compiled, run, packed, tuple(template), pointers, descriptors, grid))
    return tuple(prepared)


def _constant(argument: Any) -> Any:
    if isinstance(argument, Scalar):
        return argument.value
    return None if isinstance(argument, Absent) else argument


def _check_address(operation: str, name: str, tensor: torch.Tensor, spec: ArraySpec, device: torch.device) -> None:
    if tensor.device != device:
        raise _elsewhere(operation, name, tensor, device)
    address = tensor.data_ptr()
    if address % 16 and spec.aligned:
        problem = f"starts {address % 16} bytes after a multiple of 16, and the plan was made for an aligned array"
        wanted = "clone it, or give the plan its array_spec"
        raise InvalidInput(name, problem, wanted).under(operation)


def _elsewhere(operation: str, name: str, tensor: torch.Tensor, device: torch.device) -> InvalidInput:
    wanted = "move it there"
    return InvalidInput(name, f"is on {tensor.device} and the first input on {device}", wanted).under(operation)


def _tensor_descriptor(descriptor: Descriptor, tensor: torch.Tensor) -> Any:
    # Imported here: only Gluon plans need it.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if descriptor.layout is None:
        # Triton's compiler has chosen how the box lies in shared memory.
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, list(descriptor.shape), list(descriptor.strides), list(descriptor.box))
    shape, strides, box = list(descriptor.shape), list(descriptor.strides), list(descriptor.box)
    return TensorDescriptor(tensor, shape, strides, box, descriptor.layout)


def _check_output(operation: str, name: str, found: ArraySpec, spec: ArraySpec) -> None:
    if found.shape != spec.shape or found.dtype != spec.dtype or found.strides != spec.strides:
        problem = f"is {found.dtype}{list(found.shape)} with strides {found.element_strides}"
        wanted = f"it must be {spec.dtype}{list(spec.shape)} with strides {spec.element_strides}"
        raise InvalidInput(name, problem, wanted).under(operation)
