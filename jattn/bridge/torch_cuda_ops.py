"""The torch core's plans launched by torch on XLA's stream and buffers: implementation="torch" on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import torch

from jattn.bridge import native_ops
from jattn.bridge.callback import call_torch
from torch_core.plan.plan import OperationPlan
from torch_core.specs import ArraySpec

__all__ = [
    "attention",
    "call_operation",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "write_kv_cache",
    "write_kv_cache_per_token_head",
]


def call_operation(plan: OperationPlan, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
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
    if torch.cuda.is_available():
        from torch_core.run.launch import prepare_operation

        # While XLA captures, neither code may be loaded nor a context be made.
        prepare_operation(plan, torch.device("cuda", torch.cuda.current_device()))
    inputs = [name for name, _ in plan.inputs]
    created = (*plan.outputs, *plan.scratch)
    specs = plan.specs
    results = [name for name, _ in created] + list(plan.in_place)
    values = call_torch(
        _Launches(plan),
        [arrays[name] for name in inputs],
        [_result(specs[name]) for name in results],
        aliases={inputs.index(name): results.index(name) for name in plan.in_place},
        capturable=True,
    )
    found = dict(zip(results, values, strict=True))
    return {name: found[name] for name in (*(name for name, _ in plan.outputs), *plan.in_place)}


attention = functools.partial(native_ops.attention, call=call_operation)
copy_blocks = functools.partial(native_ops.copy_blocks, call=call_operation)
merge_states = functools.partial(native_ops.merge_states, call=call_operation)
paged_attention = functools.partial(native_ops.paged_attention, call=call_operation)
write_kv_cache = functools.partial(native_ops.write_kv_cache, call=call_operation)
write_kv_cache_per_token_head = functools.partial(native_ops.write_kv_cache_per_token_head, call=call_operation)


@dataclass(frozen=True, slots=True)
class _Launches:
    # A frozen record, not a closure: equal call sites outside jit share one compiled program.
    plan: OperationPlan

    def __call__(self, *tensors: torch.Tensor) -> None:
        from torch_core.run.launch import run_operation

        names = [name for name, _ in (*self.plan.inputs, *self.plan.outputs, *self.plan.scratch)]
        buffers = dict(zip(names, tensors, strict=True))
        run_operation(self.plan, buffers, buffers)


def _result(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
