"""A model's weights as the flat arguments of its programs, and others of the same shapes in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jattn.llm.engine.device.draft import WithDraft
from jattn.llm.models import Decoder, ParameterShards, TensorParallel, parameter_shards, put_whole
from jattn.llm.models.quantized import Fp8Kernel, kernel_sharding, round_to_fp8
from torch_core.base.errors import InvalidInput

#: Functions that return a leaf's new array, by index. Over several processes all processes call them.
Arrivals: TypeAlias = dict[int, Callable[[], jax.Array]]


class Weights:
    """The variables of a module, captured when this is made.

    Args:
        model: the model that owns the weights. With a draft model, only the weights of the target model can be replaced
            later.

    Attributes:
        graph, treedef: structure of the module, to which `leaves` belong.
        leaves: the arrays.
        specs: partition spec of each leaf over the engine's mesh.
    """

    def __init__(self, model: nnx.Module) -> None:
        self.graph, state = nnx.split(model)
        found, self.treedef = jax.tree.flatten(state)
        self.leaves = [jnp.asarray(leaf) for leaf in found]
        self.specs = tuple(getattr(leaf.sharding, "spec", PartitionSpec()) for leaf in self.leaves)
        self._parallel: TensorParallel | None = getattr(model, "parallel", None)
        self._shards: dict[str, ParameterShards] = {}
        base = model.base if isinstance(model, WithDraft) else model
        if isinstance(base, Decoder) and base.parallel is not None:
            shards = parameter_shards(base.config, base.parallel)
            self._shards = {_name(path): each for path, each in shards.items()}
        numbered = nnx.to_flat_state(jax.tree.unflatten(self.treedef, range(len(found))))
        prefix = "base." if isinstance(model, WithDraft) else ""
        variables: dict[str, Any] = {
            name.removeprefix(prefix): leaf
            for name, leaf in zip(map(_name, numbered.paths), numbered.leaves, strict=True)
            if name.startswith(prefix)
        }
        self._places = {name: variable.get_value() for name, variable in variables.items()}
        self._needed = {name for name, variable in variables.items() if isinstance(variable, nnx.Param)}

    def checked(self, state: nnx.Module | nnx.State | Mapping[Any, Any]) -> Arrivals:
        """Returns how to bring the arrays of another state to the places of these; nothing has moved yet.

        Args:
            state: a module, its state, or a nested mapping of arrays: all parameters, other variables if there. For a
                split decoder, the whole parameters, or a module with the same split. A kernel in plain numbers is
                rounded if its linear layer multiplies in FP8.

        Raises:
            InvalidInput: parameters that are missing, unknown, or of another shape or dtype; the first one is named. Or
                keys that have no order.
        """
        if not isinstance(state, nnx.Module | Mapping | nnx.State):
            raise InvalidInput("state", value=state, wanted="it must be an nnx.State, a mapping of arrays, or a module")
        shards = self._shards
        if isinstance(state, nnx.Module):
            shards = {} if getattr(state, "parallel", None) == self._parallel else shards
            state = nnx.state(state)
        try:
            flat = nnx.to_flat_state(state if isinstance(state, nnx.State) else nnx.State(dict(state)))
        except TypeError as error:
            raise InvalidInput(
                "state", f"has keys of several types on one level ({error})", "name layers by int and all else by str"
            ) from None
        given = {_name(path): nnx.as_pure(leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)}
        found: Arrivals = {}
        rounded = {name: parts for name in given.keys() - self._places.keys() if (parts := self._fp8_parts(name))}
        for name, parts in rounded.items():
            bring = self._rounding(name, given.pop(name), parts[0], shards.get(name))
            for index, part in enumerate(parts):
                found[self._places[part]] = lambda bring=bring, index=index: bring()[index]
        if unknown := given.keys() - self._places.keys():
            raise InvalidInput(f"state has {min(unknown)}, which the model has not; it has {len(self._places)} others.")
        if missing := self._needed - given.keys() - {name for parts in rounded.values() for name in parts}:
            raise InvalidInput("state", f"lacks {min(missing)}", f"{len(missing)} of {len(self._needed)} parameters do")
        for name, leaf in given.items():
            old = self.leaves[self._places[name]]
            if name in shards:
                _check(name, leaf, jax.ShapeDtypeStruct(shards[name].shape, old.dtype))
                bring = functools.partial(shards[name].placed, leaf, cast(Any, old.sharding).mesh)
            else:
                _check(name, leaf, old)
                bring = functools.partial(put_whole, leaf, old.sharding)
            found[self._places[name]] = bring
        return found

    def _fp8_parts(self, name: str) -> tuple[str, ...] | None:
        """Returns the names of the arrays that a kernel is rounded to; None for a parameter that is not rounded."""
        stem, _, last = name.rpartition(".")
        parts = tuple(f"{stem}.{part}" for part in Fp8Kernel._fields)
        return parts if last == "kernel" and all(part in self._places for part in parts) else None

    def _rounding(
        self, name: str, kernel: Any, weight_name: str, shards: ParameterShards | None
    ) -> Callable[[], Fp8Kernel]:
        weight = self.leaves[self._places[weight_name]]
        shape = weight.shape[::-1] if shards is None else shards.shape
        dtype = getattr(kernel, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        _check(name, kernel, jax.ShapeDtypeStruct(shape, dtype if is_float else jnp.bfloat16))
        sharding = kernel_sharding(weight)

        @functools.cache
        def rounded() -> Fp8Kernel:
            there = put_whole(kernel, sharding) if shards is None else shards.placed(kernel, sharding.mesh)
            return round_to_fp8(there)

        return rounded

    def checked_scales(self, scales: Mapping[str, jax.Array]) -> Arrivals:
        """Returns the same of other scales of an 8-bit cache, by path.

        Raises:
            InvalidInput: they are not those of the model's layers; the first one is named.
        """
        own = {name for name in self._places if _is_scale(name)}
        if wrong := own.symmetric_difference(scales):
            raise InvalidInput(f"scales must be of the model's {len(own) // 2} layers; {min(wrong)} is of one alone.")
        places = {self._places[name]: scale for name, scale in scales.items()}
        return {
            place: functools.partial(put_whole, scale, self.leaves[place].sharding) for place, scale in places.items()
        }

    def brought(self, arrivals: Arrivals) -> list[jax.Array]:
        """Returns the leaves with others in their places; these stay as they are.

        Arrays that lie where the old ones do are taken as they are, without a copy.
        """
        leaves = list(self.leaves)
        for place, bring in arrivals.items():
            leaves[place] = bring()
        return leaves


def _is_scale(name: str) -> bool:
    return ".kv_scales." in name


def _name(path: Any) -> str:
    return ".".join(map(str, path))


def _check(name: str, leaf: Any, old: jax.Array | jax.ShapeDtypeStruct) -> None:
    found = (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
    if found != (old.shape, old.dtype):
        what = f"{found[1]}{list(found[0])}" if found[0] is not None else f"a {type(leaf).__name__}"
        raise InvalidInput(name, f"is {what}", f"the model's is {old.dtype}{list(old.shape)}")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise InvalidInput(name, "was donated or deleted", "give the array that took its place")
