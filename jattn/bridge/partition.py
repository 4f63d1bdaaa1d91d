"""Calls that partition themselves: where operands are split over heads, each device computes its own.

XLA cannot look into a custom call: it would gather every operand and compute everything everywhere. What may be split
stands in the annotations of the call's fields: axes of heads, and nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jattn.bridge.callback import recorded
from jattn.bridge.calls import Runtime, array_spec
from jattn.bridge.torch_runtime import run_torch
from torch_core.calls import Call
from torch_core.calls.call import array_fields
from torch_core.errors import Unsupported

__all__ = ["partitioned"]

_HEADS = ("num_heads", "num_kv_heads")


def partitioned(runtime: Runtime, *, opaque: bool = True) -> Runtime:
    """Returns the runtime for programs that may run on several devices: no operand is gathered.

    Along Explicit mesh axes the split is known while tracing, and a shard_map follows it. Along Auto axes the
    partitioner tells when it compiles: XLA's own for jnp, and else custom_partitioning with a rule for Shardy. Inside a
    shard_map over all axes, and where there is one device, nothing is added.

    Args:
        runtime: which runs a call on one device.
        opaque: XLA cannot look into it.

    Raises:
        Unsupported: while tracing or compiling: an operand is split along anything but heads, heads are split in
            different ways, axes of several types meet, or torch's callback would have to be split along Auto axes.
    """

    def run(call: Call[jax.Array]) -> dict[str, jax.Array]:
        if jax.device_count() == 1:
            return runtime(call)
        arrays = call.arrays()
        parts = _Parts(call.map(array_spec), tuple(arrays), (*call.outputs(), *call.written), runtime)
        results = _run(parts, tuple(arrays.values()), _run_auto if opaque else _Parts.run)
        return dict(zip(parts.results, results, strict=True))

    return run


@dataclass(frozen=True)
class _Parts:
    """A call without its arrays: their specs and names, the names of its results, and who runs it."""

    call: Call[Any]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    runtime: Runtime

    def run(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the call on whole arrays, or on one device's parts of them."""
        found = self.runtime(self.call.with_arrays(dict(zip(self.operands, arrays, strict=True))))
        return tuple(found[name] for name in self.results)

    def dims(self, name: str) -> tuple[str, ...]:
        """Returns the names of the axes of an operand or a result."""
        if name == "lse":
            return self.dims("out")[:2]
        fields = array_fields(type(self.call))
        # A gradient has the axes of what it is the gradient of.
        dims = fields[name if name in fields else name.removeprefix("d_")].dims
        if "..." not in dims:
            return dims
        # Blocks that are copied whole: heads are where all caches have them, and latents have none.
        ndim = len(self.call.arrays()[name].shape)
        heads = ndim - 2 if ndim > 3 else None
        return (dims[0], *("num_kv_heads" if axis == heads else f"axis {axis}" for axis in range(1, ndim)))

    def specs(self, mesh: Any, found: Sequence[Any]) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """Returns how operands have to be split over a mesh, and how results are, from the operands' shardings.

        An operand that is whole on every device is cut there, unless it is written: that would move it.
        """
        heads: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, int] = {}
        for name, sharding in zip(self.operands, found, strict=True):
            for dim, size, axes in zip(
                self.dims(name), self.call.arrays()[name].shape, _axes_of(mesh, sharding.spec), strict=False
            ):
                if axes and dim not in _HEADS:
                    raise Unsupported(
                        f"{self.call.name}: {name} is split along {dim} by mesh axis {', '.join(axes)}; an op splits "
                        "itself along heads alone. Undo that split of its operands and results "
                        "(jax.lax.with_sharding_constraint, or jax.sharding.reshard along Explicit axes), or call it "
                        "inside jax.shard_map with each device's own sequences and blocks."
                    )
                if dim in _HEADS and size > 1:
                    heads[name], sizes[name] = axes, size
        ways = {axes for name, axes in heads.items() if axes or name in self.call.written}
        axes = max(ways, default=())
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if len(ways) > 1 or any(size % parts for size in sizes.values()):
            given = ", ".join(
                f"{name} ({sizes[name]} heads) by {' and '.join(axes) or 'none'}" for name, axes in heads.items()
            )
            raise Unsupported(
                f"{self.call.name}: heads are split by mesh axes as follows: {given}. Split all alike, by axes whose "
                "sizes divide the key/value heads; where those are fewer than devices, repeat them."
            )
        shapes = {name: array.shape for name, array in (*self.call.arrays().items(), *self.call.outputs().items())}

        def spec(name: str) -> PartitionSpec:
            dims = zip(self.dims(name), shapes[name], strict=True)
            return PartitionSpec(*(axes if dim in _HEADS and size > 1 else None for dim, size in dims))

        return tuple(map(spec, self.operands)), tuple(map(spec, self.results))


def _run(parts: _Parts, arrays: Sequence[jax.Array], run_auto: Callable[..., Any]) -> Sequence[jax.Array]:
    shardings = [jax.typeof(array).sharding for array in arrays]
    context = jax.sharding.get_abstract_mesh()
    mesh = next((sharding.mesh for sharding in shardings if not sharding.mesh.empty), context)
    auto = [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]
    others = (*mesh.explicit_axes, *mesh.manual_axes)
    if auto and others and run_auto is _run_auto:
        raise Unsupported(
            f"{parts.call.name}: mesh axes {', '.join(auto)} are of type Auto and {', '.join(others)} are not; call it "
            "inside a jax.shard_map over all axes, or make all of one type."
        )
    if not mesh.explicit_axes:
        return run_auto(parts, *arrays) if auto or mesh.empty else parts.run(*arrays)
    in_specs, out_specs = parts.specs(mesh, shardings)
    cut = [jax.sharding.reshard(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, in_specs, strict=True)]
    return jax.shard_map(
        parts.run,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.explicit_axes),
        check_vma=False,
    )(*cut)


@functools.partial(custom_partitioning, static_argnums=(0,))
def _run_auto(parts: _Parts, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return parts.run(*arrays)


def _partition(parts: _Parts, mesh: Any, operands: Sequence[Any], results: Any) -> tuple[Any, ...]:
    try:
        in_specs, out_specs = parts.specs(mesh, [operand.sharding for operand in operands])
    except Unsupported as error:
        raise recorded(error) from error
    return (mesh, parts.run, *(tuple(NamedSharding(mesh, spec) for spec in specs) for specs in (out_specs, in_specs)))


def _rule(parts: _Parts, mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
    """Returns Shardy's rule: axes of one name are one factor, query heads are key/value heads times group."""
    if parts.runtime is run_torch:
        raise Unsupported(
            f"{parts.call.name}: implementation='torch' cannot be split along Auto mesh axes, because JAX's "
            "custom_partitioning loses callbacks; use implementation='triton' or 'xla', a mesh of Explicit axes, or "
            "jax.shard_map."
        )
    num_heads, num_kv_heads = (getattr(parts.call, name, 1) for name in _HEADS)
    query_heads, sizes = "num_kv_heads" if num_heads == num_kv_heads else "num_heads", {}
    # An axis that does not divide the key/value heads would be split itself, and could not be named in a refusal.
    if 1 < num_kv_heads < num_heads and not any(num_kv_heads % size for size in mesh.shape.values()):
        query_heads, sizes = "(num_kv_heads group)", {"group": num_heads // num_kv_heads}

    def mapping(name: str) -> str:
        # What is no plain name, as num_seqs+1, is a factor of its own.
        dims = [dim if dim.isidentifier() else f"{name}_{axis}" for axis, dim in enumerate(parts.dims(name))]
        return " ".join(query_heads if dim == "num_heads" else dim for dim in dims)

    return " -> ".join(", ".join(map(mapping, names)) for names in (parts.operands, parts.results)), sizes


_run_auto.def_partition(_partition, sharding_rule=_rule)


def _axes_of(mesh: Any, spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of more than one device that split each of an array's first axes."""
    named = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in named]
