"""Runs the launches of a plan without a GPU: Gluon kernels emulated, Triton kernels interpreted."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gluon_language
from triton.runtime.jit import JITFunction

from tests.support.emulated.language import Language
from tests.support.emulated.machine import Machine
from tests.support.emulated.scheduler import Scheduler
from tests.support.emulated.values import Pointer, Shared, Tensor, flat_memory
from tests.support.interpret import run_interpreted_launch
from torch_core.launch.plan import Descriptor, LaunchPlan, OperationPlan, Scalar
from torch_core.launch.plan import Pointer as PlanPointer
from torch_core.launch.tensors import torch_dtype

__all__ = ["run_emulated_launch", "run_emulated_operation"]


def run_emulated_operation(
    plan: OperationPlan, buffers: Mapping[str, torch.Tensor], seed: int, resident: int = 1
) -> dict[str, torch.Tensor]:
    """Runs a plan on CPU tensors; outputs and scratch are made, and hold poison before. Returns the outputs.

    Args:
        plan: the plan.
        buffers: its inputs by name.
        seed: of the order in which warps and copies of programs come.
        resident: how many programs of a Gluon kernel run at the same time; they start in the order of a device.
    """
    tensors = dict(buffers)
    for name, spec in (*plan.outputs, *plan.scratch):
        tensors[name] = (
            torch.full(spec.shape, -1).to(torch_dtype(spec.dtype))
            if "int" in spec.dtype
            else torch.full(spec.shape, torch.nan).to(torch_dtype(spec.dtype))
        )
    for launch in plan.launches:
        if launch.kernel.is_gluon():
            run_emulated_launch(launch, tensors, seed, resident)
        else:
            run_interpreted_launch(launch, tensors)
    return {name: tensors[name] for name, _ in plan.outputs}


def run_emulated_launch(launch: LaunchPlan, tensors: Mapping[str, torch.Tensor], seed: int, resident: int = 1) -> None:
    """Runs one launch of a Gluon kernel on the buffers, which it writes in place; see `run_emulated_operation`."""
    given: dict[str, Any] = dict(launch.constexprs)
    for name, argument in launch.arguments:
        given[name] = _argument(argument, tensors)
    (programs,) = launch.grid
    scheduler = Scheduler(seed, resident)

    def run(program: int) -> None:
        _emulated(launch.kernel, Language(Machine(scheduler), program, programs), {})(**given)

    scheduler.run((f"program {i}", launch.num_warps, functools.partial(run, i)) for i in range(programs))


def _argument(argument: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(argument, PlanPointer):
        return Pointer(flat_memory(tensors[argument.buffer]))
    if isinstance(argument, Descriptor):
        memory = flat_memory(tensors[argument.buffer])
        strides = [stride * memory.itemsize for stride in argument.strides]
        return Shared(np.lib.stride_tricks.as_strided(memory, argument.shape, strides))
    if isinstance(argument, Scalar):
        return Tensor({"fp32": np.float32, "i32": np.int32, "i64": np.int64}[argument.type](argument.value))
    return None


def _emulated(kernel: JITFunction, language: Language, known: dict[Any, Any]) -> Any:
    """The kernel's Python function, with the language and all that it calls replaced by what runs here."""
    original = kernel.fn
    if original not in known:
        scope = dict(original.__globals__)
        function = types.FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
        known[original] = function
        for name in original.__code__.co_names:
            value = scope.get(name)
            if name in language.names:
                scope[name] = language.names[name]
            elif value is gluon_language or getattr(value, "__name__", None) == "triton.language":
                scope[name] = language
            elif isinstance(value, JITFunction):
                scope[name] = _emulated(value, language, known)
            elif isinstance(value, gluon_language.constexpr):
                scope[name] = value.value
    return known[original]
