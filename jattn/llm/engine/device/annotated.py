"""Models that say by flax's sharding annotations how their variables are cut over a mesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn.llm.models import PagedModel, put_whole
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput

#: Pairs of a logical axis and its mesh axis, None for an axis that is not cut; flax's `logical_axis_rules`.
AxisRules = Sequence[tuple[str, str | None]]


def is_annotated(model: PagedModel) -> bool:
    """Returns whether a variable of a module has flax's sharding metadata, as from `nnx.with_partitioning`."""
    variables = jax.tree.leaves(nnx.state(cast(nnx.Module, model)), is_leaf=_is_variable)
    return any(variable.get_metadata("out_sharding", None) for variable in filter(_is_variable, variables))


def place_annotated(model: PagedModel, mesh: Mesh, rules: AxisRules | None) -> PagedModel:
    """Returns a module whose variables lie on a mesh as their annotations say; without one, on every device.

    Args:
        model: a module whose annotations name mesh axes, or logical axes of the rules.
        mesh: the devices.
        rules: mesh axes of logical axes; None for those of `nnx.logical_axis_rules` and of the variables themselves.

    Raises:
        InvalidInput: an annotation names an axis that the mesh lacks, has more axes than its array, or does not divide
            it. The message names the variable.
    """
    graph, state = nnx.split(cast(nnx.Module, model))
    with contextlib.nullcontext() if rules is None else nnx.logical_axis_rules(tuple(rules)):
        flat: Any = nnx.to_flat_state(nnx.get_partition_spec(state))
    specs = {path: nnx.as_pure(spec) for path, spec in flat}
    found: list[Any] = []
    pairs: Any = nnx.to_flat_state(state)
    for path, variable in pairs:
        array, spec = nnx.as_pure(variable), specs[path]
        _check(".".join(map(str, path)), array.shape, spec, mesh)
        place = functools.partial(put_whole, sharding=NamedSharding(mesh, spec))
        found.append((path, variable.replace(place(array)) if _is_variable(variable) else place(array)))
    placed: Any = nnx.merge(graph, nnx.from_flat_state(found))
    return placed


def _check(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    annotation = f"is annotated with {shown(tuple(spec))}"
    if len(spec) > len(shape):
        raise InvalidInput(name, annotation, f"it has {len(shape)} axes, and an annotation has one entry for each")
    for index, entry in enumerate(spec):
        parts = 1
        for axis in () if entry is None else entry if isinstance(entry, tuple) else (entry,):
            if axis not in mesh.shape:
                raise InvalidInput(
                    name,
                    annotation,
                    f"the engine's mesh has the axes {', '.join(mesh.axis_names)}; say where {shown(axis)} goes, None "
                    f"for nowhere: EngineConfig(logical_axis_rules=(({axis!r}, None),))",
                )
            parts *= mesh.shape[axis]
        if shape[index] % parts:
            wanted = f"{parts} devices must divide axis {index} ({shape[index]})"
            raise InvalidInput(name, f"has shape {shape} and {annotation}", wanted)


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)
