"""Calls that partition themselves: if operands are split over heads or sequences, each device computes its own.

XLA cannot look into a custom call: it would gather every operand and compute everything everywhere.
`jattn.bridge.split` decides which axes may be split, and how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jattn.bridge.calls import Runtime, array_spec
from jattn.bridge.errors import recorded
from jattn.bridge.split import HEADS, Split, dims_of, split_of
from jattn.bridge.torch_runtime import run_torch
from torch_core.base.errors import Unsupported
from torch_core.launch.call import Call


def partitioned(runtime: Runtime, *, opaque: bool = True) -> Runtime:
    """Returns the runtime for programs that may run on several devices: no operand is gathered.

    Along Explicit mesh axes the split is known while tracing, and a shard_map follows it. Along Auto axes the
    partitioner tells when it compiles: XLA's own for jnp, and else custom_partitioning with a rule for Shardy. Inside a
    shard_map over all axes, and where there is one device, nothing is added.

    Args:
        runtime: the function that runs a call on one device.
        opaque: XLA cannot look into it.

    Raises:
        Unsupported: while tracing or compiling: an operand is split along anything but heads and even sequences, or
            they are split in different ways, axes of several types meet, or torch's callback would have to be split
            along Auto axes.
    """

    def run(call: Call[jax.Array]) -> dict[str, jax.Array]:
        if jax.device_count() == 1:
            return runtime(call)
        arrays = call.arrays()
        parts = _Parts(call.map(array_spec), tuple(arrays), (*call.outputs(), *call.written), runtime)
        results = _run(parts, tuple(arrays.values()), _run_auto if opaque else _Parts.run)
        return dict(zip(parts.results, results, strict=True))

    return run


def may_be_split(array: jax.Array) -> bool:
    """Returns whether devices may split a call with this operand: not inside a shard_map over all axes, nor on one."""
    if jax.device_count() == 1:
        return False
    mesh = _mesh_of([array])
    return mesh.empty or bool(mesh.explicit_axes or _auto_axes(mesh))


@dataclass(frozen=True)
class _Parts:
    """A call without its arrays: their specs and names, the names of its results, and who runs it."""

    call: Call[Any]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    runtime: Runtime

    def run(self, *arrays: jax.Array, split: Split | None = None) -> tuple[jax.Array, ...]:
        """Runs the call on whole arrays, or on one device's parts of them."""
        call = self.call.with_arrays(dict(zip(self.operands, arrays, strict=True)))
        if split is None:
            found = self.runtime(call)
            return tuple(found[name] for name in self.results)
        local, fits = split.localised(call)
        found = self.runtime(local)
        return tuple(split.joined(self.call, name, found[name], fits) for name in self.results)

    def specs(
        self, mesh: Any, found: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """Returns the function that runs a part, and the shardings of operands and results."""
        given = zip(self.operands, (sharding.spec for sharding in found), strict=True)
        split = split_of(self.call, mesh, dict(given))
        shapes = {name: array.shape for name, array in (*self.call.arrays().items(), *self.call.outputs().items())}
        specs = {name: split.spec(dims_of(self.call, name), shape) for name, shape in shapes.items()}
        in_specs, out_specs = (tuple(specs[name] for name in names) for names in (self.operands, self.results))
        return functools.partial(self.run, split=split), in_specs, out_specs


def _run(parts: _Parts, arrays: Sequence[jax.Array], run_auto: Callable[..., Any]) -> Sequence[jax.Array]:
    mesh = _mesh_of(arrays)
    auto = _auto_axes(mesh)
    others = (*mesh.explicit_axes, *mesh.manual_axes)
    if auto and others and run_auto is _run_auto:
        raise Unsupported(
            f"{parts.call.name}: mesh axes {', '.join(auto)} are of type Auto and {', '.join(others)} are not; call it "
            "inside a jax.shard_map over all axes, or make all of one type."
        )
    if not mesh.explicit_axes:
        return run_auto(parts, *arrays) if auto or mesh.empty else parts.run(*arrays)
    run, in_specs, out_specs = parts.specs(mesh, [jax.typeof(array).sharding for array in arrays])
    cut = [jax.sharding.reshard(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, in_specs, strict=True)]
    return jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(mesh.explicit_axes), check_vma=False
    )(*cut)


def _mesh_of(arrays: Sequence[jax.Array]) -> Any:
    """Returns the mesh of the first array that has one, or of the context."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _auto_axes(mesh: Any) -> list[str]:
    return [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]


@functools.partial(custom_partitioning, static_argnums=(0,))
def _run_auto(parts: _Parts, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return parts.run(*arrays)


def _partition(parts: _Parts, mesh: Any, operands: Sequence[Any], results: Any) -> tuple[Any, ...]:
    try:
        run, in_specs, out_specs = parts.specs(mesh, [operand.sharding for operand in operands])
    except Unsupported as error:
        raise recorded(error) from error
    return (mesh, run, *(tuple(NamedSharding(mesh, spec) for spec in specs) for specs in (out_specs, in_specs)))


def _rule(parts: _Parts, mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
    """Returns Shardy's rule: axes of one name are one factor, query heads are key/value heads times group.

    Rows of even sequences are sequences times rows.
    """
    if parts.runtime is run_torch:
        raise Unsupported(
            f"{parts.call.name}: implementation='torch' cannot be split along Auto mesh axes, because JAX's "
            "custom_partitioning loses callbacks; use implementation='triton' or 'xla', a mesh of Explicit axes, or "
            "jax.shard_map."
        )
    num_heads, num_kv_heads = (getattr(parts.call, name, 1) for name in HEADS)
    query_heads, sizes = "num_kv_heads" if num_heads == num_kv_heads else "num_heads", {}
    # An axis that does not divide the key/value heads would be split itself, and could not be named in a refusal.
    if 1 < num_kv_heads < num_heads and not any(num_kv_heads % size for size in mesh.shape.values()):
        query_heads, sizes = "(num_kv_heads group)", {"group": num_heads // num_kv_heads}

    factors, num_seqs = {"num_heads": query_heads}, getattr(parts.call, "num_seqs", 0)
    for dim, rows in parts.call.rows_of_a_sequence().items():
        if rows == 1:
            factors[dim] = "num_seqs"
        elif not any(num_seqs % size for size in mesh.shape.values()):
            factors[dim], sizes[f"{dim}_each"] = f"(num_seqs {dim}_each)", rows
    factors |= parts.call.equal_axes()

    def mapping(name: str) -> list[str]:
        # An axis that is not a plain name, such as num_seqs+1, is a separate factor.
        dims = [dim if dim.isidentifier() else f"{name}_{axis}" for axis, dim in enumerate(dims_of(parts.call, name))]
        return [factors.get(dim, dim) for dim in dims]

    sides = [[mapping(name) for name in names] for names in (parts.operands, parts.results)]
    found = {factor for side in sides for each in side for factor in each}
    # JAX needs the size of a factor that is never an axis by itself: dense sequences have no array with a row for each.
    if "num_seqs" not in found and any(factor.startswith("(num_seqs ") for factor in found):
        sizes["num_seqs"] = num_seqs
    return " -> ".join(", ".join(map(" ".join, side)) for side in sides), sizes


_run_auto.def_partition(_partition, sharding_rule=_rule)
