"""Calls run by torch on XLA's buffers, in a callback: implementation="torch"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jattn.bridge.calls import array_spec
from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call
from torch_core.launch.plan import OperationPlan

if TYPE_CHECKING:
    import torch

# Below this many multiply-adds a second OpenMP thread costs more than it brings: XLA's own threads hold the cores.
# Measured with the embedded model.
_ONE_THREAD_BELOW = 1 << 24


def run_torch(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """Runs a call by torch: its kernels' launch plan on CUDA, plain torch on a CPU; in place, on XLA's memory alone."""
    call = call.for_kernels(jnp)
    specs = call.map(array_spec)
    if jax.default_backend() == "gpu":
        from jattn.bridge.native import device_limits
        from torch_core.launch.planner import plan_call

        return launch_operation(plan_call(specs, device_limits()), call.arrays())
    from torch_core.launch.run import run_on_cpu

    arrays = call.arrays()
    outputs = call.outputs()
    return _call(
        _Compute(run_on_cpu, specs, tuple(arrays), tuple(outputs)),
        arrays,
        outputs,
        call.written,
        num_threads=1 if specs.work < _ONE_THREAD_BELOW else None,
    )


def launch_operation(plan: OperationPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds one callback that launches all kernels of a plan from torch; nothing is allocated when it runs.

    Outputs and scratch are XLA's, so XLA can capture the launches in a CUDA graph: Python then runs once for each call
    site (and again when buffers move), not for each call. The kernels are those of `jattn.bridge.native`, so results
    are equal bit by bit.

    Args:
        plan: made for these shapes and dtypes, contiguous.
        arrays: the plan's inputs by name.

    Returns:
        The plan's outputs and the new values of its in-place operands, by name.

    Raises:
        Unsupported: a kernel does not fit the device.
    """
    import torch

    if torch.cuda.is_available():
        from torch_core.launch.launcher import prepare_operation

        # While XLA captures, neither code may be loaded nor a context be made: of no device that may run the program.
        for device in jax.local_devices():
            if device.platform == "gpu":
                prepare_operation(plan, torch.device("cuda", device.local_hardware_id))
    outputs = dict((*plan.outputs, *plan.scratch))
    inputs = {name: arrays[name] for name, _ in plan.inputs}
    results = _call(_Launch(plan), inputs, outputs, plan.in_place, capturable=True)
    return {name: results[name] for name in (*dict(plan.outputs), *plan.in_place)}


# The functions that the callback runs are frozen records, not closures: equal ones share one compiled program.
@dataclass(frozen=True, slots=True)
class _Compute:
    """Who runs it, a call of specs, and the names of the tensors that come in: inputs, then outputs."""

    run: Callable[[Call[torch.Tensor]], Mapping[str, torch.Tensor]]
    specs: Call[ArraySpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, *tensors: torch.Tensor) -> None:
        given = dict(zip((*self.inputs, *self.outputs), tensors, strict=True))
        known = {field.name for field in fields(self.specs)}
        call = self.specs.with_arrays({name: tensor for name, tensor in given.items() if name in known})
        # Shapes and dtypes were checked when the program was traced, values when the metadata was built: checking
        # them again in every layer would cost a third of a decode step.
        try:
            results = self.run(call)
        except Exception:
            # The check explains a fault of the values; if it finds none, the original failure is raised.
            call.check_values()
            raise
        for name in self.outputs:
            if name not in known:
                given[name].copy_(results[name])


@dataclass(frozen=True, slots=True)
class _Launch:
    plan: OperationPlan

    def __call__(self, *tensors: torch.Tensor) -> None:
        from torch_core.launch.launcher import run_operation

        names = [name for name, _ in (*self.plan.inputs, *self.plan.outputs, *self.plan.scratch)]
        buffers = dict(zip(names, tensors, strict=True))
        run_operation(self.plan, buffers, buffers)


def _call(
    function: _Compute | _Launch,
    arrays: Mapping[str, jax.Array],
    outputs: Mapping[str, ArraySpec],
    in_place: tuple[str, ...],
    *,
    num_threads: int | None = None,
    capturable: bool = False,
) -> dict[str, jax.Array]:
    # Loads torch, which nothing else on the way here needs; not in a thread of XLA's, when the program runs.
    from jattn.bridge.callback import call_torch

    names, results = list(arrays), [*outputs, *in_place]
    specs = {**outputs, **{name: array_spec(arrays[name]) for name in in_place}}
    values = call_torch(
        function,
        list(arrays.values()),
        [jax.ShapeDtypeStruct(specs[name].shape, specs[name].dtype) for name in results],
        aliases={names.index(name): results.index(name) for name in in_place},
        num_threads=num_threads,
        capturable=capturable,
    )
    return dict(zip(results, values, strict=True))
