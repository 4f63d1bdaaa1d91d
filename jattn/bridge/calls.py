"""Calls of JAX arrays: pytrees whose leaves are the arrays, and one way from a call to the program that runs it.

Barriers keep an array, which a custom call updates in place, at the address that XLA gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from torch_core.base.specs import ArraySpec
from torch_core.launch.call import Call, array_fields

#: Adds a call to the traced program, or runs it outside a trace: returns its outputs and the new values of the arrays
#: that it writes, by name. `jattn.bridge.native.run_native` and `jattn.bridge.torch_runtime.run_torch` are two.
Runtime: TypeAlias = Callable[[Call[jax.Array]], dict[str, jax.Array]]


def run(call: Call[jax.Array], runtime: Runtime) -> dict[str, jax.Array]:
    """Runs a checked call by a runtime; a call of nothing gives zeros, and -inf for a log-sum-exp, without one.

    An array that is written is consumed: use the returned one.
    """
    if not call.is_empty:
        return runtime(call)
    arrays = call.arrays()
    return {**empty_outputs(call), **{name: arrays[name] for name in call.written}}


def varying(arrays: Sequence[jax.Array], beside: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays that vary over the same mesh axes as the arrays that they are computed from.

    Inside a `jax.shard_map` that checks this (`check_vma`, its default) JAX cannot see it through a custom call.
    """
    axes = frozenset().union(*map(_varies_over, beside))
    if not axes:
        return list(arrays)
    missing = [tuple(sorted(axes - _varies_over(array))) for array in arrays]
    return [jax.lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True)]


def _varies_over(array: jax.Array) -> frozenset[str]:
    kind = jax.typeof(array)
    # JAX renamed it; without either nothing is checked.
    return getattr(getattr(kind, "manual_axis_type", None), "varying", None) or getattr(kind, "vma", frozenset())


def empty_outputs(call: Call[jax.Array]) -> dict[str, jax.Array]:
    """Returns the outputs of a call whose rows see nothing: zeros, and -inf for a log-sum-exp."""
    return {
        name: jnp.full(spec.shape, -jnp.inf if name == "lse" else 0, spec.dtype)
        for name, spec in call.outputs().items()
    }


def array_spec(array: jax.Array | jax.ShapeDtypeStruct) -> ArraySpec:
    """Returns the spec of an array or tracer, as the plans take it: contiguous and aligned."""
    return ArraySpec(tuple(array.shape), np.dtype(array.dtype).name)


def register_call(call_class: type[Call[Any]]) -> None:
    """Makes the calls of a class pytrees, whose leaves are their arrays."""
    # Options and scales that are numbers are static: they are part of the compiled program.
    arrays = tuple(array_fields(call_class))
    options = tuple(field.name for field in fields(call_class) if field.name not in arrays)

    def flatten(call: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values = [getattr(call, name) for name in arrays]
        numbers = tuple(value if isinstance(value, (int, float)) else None for value in values)
        children = [
            (jax.tree_util.GetAttrKey(name), None if number is not None else value)
            for name, value, number in zip(arrays, values, numbers, strict=True)
        ]
        return children, (numbers, tuple(getattr(call, name) for name in options))

    def unflatten(static: tuple[Any, ...], children: Any) -> Any:
        # Not through the constructor: JAX puts other things than arrays into a pytree, too.
        given = [child if number is None else number for child, number in zip(children, static[0], strict=True)]
        return call_class.of(dict(zip((*arrays, *options), (*given, *static[1]), strict=True)))

    jax.tree_util.register_pytree_with_keys(call_class, flatten, unflatten)


def pinned(arrays: Sequence[jax.Array], numbers: Container[int]) -> list[jax.Array]:
    """Returns a call's operands or results, those of the given numbers as arrays that no slice is folded into.

    XLA's dynamic-slice fusion, on by default on GPUs from jaxlib 0.11.1, folds the slices around a custom call into
    addresses: `x[i]` before it, `x.at[i].set` after it, a scan's and a vmap's among them. Until its
    PreservesCustomCallAliases (xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc) it forgot that one was
    to be updated instead of the other: a kernel then wrote to the sliced array, often one that had not been donated,
    and not to the result. Kernels cannot read some slices either: see `jattn.bridge.launch`. XLA removes the barrier
    after that pass; programs without such slices stay as they are.
    """
    return [
        jax.lax.optimization_barrier(array) if index in numbers and isinstance(array, Tracer) else array
        for index, array in enumerate(arrays)
    ]
