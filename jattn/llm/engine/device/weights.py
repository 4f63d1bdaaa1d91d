"""A model's weights as the flat arguments of its programs, and others of the same shapes in their place."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jattn.llm.engine.device.draft import WithDraft
from jattn.llm.load.kv_scales import KVCacheScales
from jattn.llm.models import Decoder, ParameterShards, TensorParallel, parameter_shards, put_whole
from jattn.llm.models.latent import with_whole_expansions
from jattn.llm.models.quantized import Fp8Kernel, kernel_sharding, round_to_fp8
from jattn.llm.reports import LOGGER
from jattn.nn.expansion import LatentExpansion, split_kernel
from torch_core.base.checks import check_bool, check_int
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import LARGEST_CODE

#: Functions that return a leaf's new array, by index. Over several processes all processes call them.
Arrivals: TypeAlias = dict[int, Callable[[], jax.Array]]


class Structure:
    """A module without its arrays: what a program is made of, and so its key.

    Equal structures share programs. A structure with an object that has no hash (a dataclass that can change, a config
    of transformers) equals no other: programs of before the object changed would serve another model.

    Attributes:
        is_shared: whether it may equal another one.
    """

    def __init__(self, graph: Any, treedef: Any) -> None:
        self._graph, self._treedef = graph, treedef
        try:
            self._hash, self.is_shared = hash((graph, treedef)), True
        except TypeError:
            self._hash, self.is_shared = id(self), False

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not (isinstance(other, Structure) and self.is_shared and other.is_shared):
            return self is other
        return (self._hash, self._graph, self._treedef) == (other._hash, other._graph, other._treedef)

    def merge(self, leaves: list[jax.Array]) -> Any:
        """Returns a module of this structure with these arrays."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))


class Weights:
    """The variables of a module, captured when this is made.

    Args:
        model: the model that owns the weights. With a draft model, only the weights of the target model can be replaced
            later.

    Attributes:
        structure: the module without them.
        leaves: the arrays.
        specs: partition spec of each leaf over the engine's mesh.
    """

    def __init__(self, model: nnx.Module) -> None:
        graph, state = nnx.split(model)
        found, treedef = jax.tree.flatten(state)
        self.structure = Structure(graph, treedef)
        self.leaves = [jnp.asarray(leaf) for leaf in found]
        self.specs = tuple(getattr(leaf.sharding, "spec", PartitionSpec()) for leaf in self.leaves)
        self._parallel: TensorParallel | None = getattr(model, "parallel", None)
        self._shards: dict[str, ParameterShards] = {}
        base = model.base if isinstance(model, WithDraft) else model
        if isinstance(base, Decoder) and base.parallel is not None:
            shards = parameter_shards(base.config, base.parallel)
            self._shards = {_name(path): each for path, each in shards.items()}
        # The sizes of a head's key and value.
        self._expansions = {
            f"{_name(path)}.kernel": (module.key_size, module.value_size)
            for path, module in nnx.iter_modules(cast(nnx.Module, base))
            if isinstance(module, LatentExpansion)
        }
        numbered = nnx.to_flat_state(jax.tree.unflatten(treedef, range(len(found))))
        prefix = "base." if isinstance(model, WithDraft) else ""
        variables: dict[str, Any] = {
            name.removeprefix(prefix): leaf
            for name, leaf in zip(map(_name, numbered.paths), numbered.leaves, strict=True)
            if name.startswith(prefix)
        }
        # A module may have plain arrays, too.
        self._places: dict[str, int] = {name: nnx.as_pure(variable) for name, variable in variables.items()}
        self._needed = {name for name, variable in variables.items() if isinstance(variable, nnx.Param)}

    def model(self) -> Any:
        """Returns a module with the arrays; with a draft model, the target."""
        model = with_whole_expansions(self.structure.merge(self.leaves))
        return model.base if isinstance(model, WithDraft) else model

    def checked(
        self,
        state: nnx.Module | nnx.State | nnx.FlatState[Any] | Mapping[Any, Any],
        *,
        partial: bool = False,
        prefix: str = "",
        cast: bool = False,
    ) -> Arrivals:
        """Returns how to bring the arrays of another state to the places of these; nothing has moved yet.

        Args:
            state: a module, its state, or a nested mapping of arrays: all parameters, other variables if there. For a
                split decoder, the whole parameters, or a module with the same split. A kernel in plain numbers is
                rounded if its linear layer multiplies in FP8.
            partial, prefix, cast: see `Engine.update_weights`.

        Raises:
            InvalidInput: parameters that are missing, unknown, or of another shape or dtype; the first one is named.
                Keys that have no order. Options of another type.
        """
        check_bool("partial", partial)
        check_bool("cast", cast)
        if not isinstance(prefix, str):
            raise InvalidInput("prefix", value=prefix, wanted="it must be a path with dots, or empty")
        if not isinstance(state, nnx.Module | Mapping | nnx.State | nnx.FlatState):
            raise InvalidInput("state", value=state, wanted="it must be an nnx.State, a mapping of arrays, or a module")
        shards = self._shards
        if isinstance(state, nnx.Module):
            shards = {} if getattr(state, "parallel", None) == self._parallel else shards
            state = nnx.state(state)
        try:
            nested = state if isinstance(state, nnx.State | nnx.FlatState) else nnx.State(dict(state))
            flat = nested if isinstance(nested, nnx.FlatState) else nnx.to_flat_state(nested)
        except TypeError as error:
            wanted = "name layers by int and all else by str"
            raise InvalidInput("state", f"has keys of several types on one level ({error})", wanted) from None
        above = tuple(prefix.split(".")) if prefix else ()
        if prefix and not any(name.startswith(f"{prefix}.") for name in self._places):
            raise InvalidInput("prefix", value=prefix, wanted=f"no parameter has it; one is {min(self._places)}")
        names = [_name((*above, *path)) for path in flat.paths]
        # nnx.as_pure takes 6 us for each.
        pure = (leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for leaf in flat.leaves)
        given: dict[str, Any] = dict(zip(names, pure, strict=True))
        found: Arrivals = {}
        converted = {name: parts for name in given.keys() - self._places.keys() if (parts := self._parts(name))}
        for name, parts in converted.items():
            if twice := given.keys() & set(parts):
                raise InvalidInput("state", f"has {name} and {min(twice)}, which is a part of it", "give one of them")
            if name in self._expansions:
                bring = self._splitting(name, given.pop(name), parts, shards.get(name), cast)
            else:
                bring = self._rounding(name, given.pop(name), parts[0], shards.get(name))
            for index, part in enumerate(parts):
                found[self._places[part]] = lambda bring=bring, index=index: bring()[index]
        if unknown := given.keys() - self._places.keys():
            raise InvalidInput(f"state has {min(unknown)}, which the model has not; it has {len(self._places)} others.")
        if not given and not converted:
            raise InvalidInput("state", "is empty", "give at least one array")
        covered = given.keys() | {name for parts in converted.values() for name in parts}
        if not partial and (missing := self._as_given(self._needed - covered)):
            count = f"{len(missing)} of {len(self._as_given(self._needed))} parameters do"
            raise InvalidInput("state", f"lacks {min(missing)}", count)
        for name, leaf in given.items():
            old: Any = self.leaves[self._places[name]]
            shape = shards[name].shape if name in shards else old.shape
            _check(name, leaf, shape, _dtype_of(leaf, old) if cast else old.dtype)
            place = functools.partial(shards[name].placed, mesh=old.sharding.mesh) if name in shards else None
            found[self._places[name]] = functools.partial(_bring, leaf, old, place)
        return found

    def _as_given(self, names: Iterable[str]) -> list[str]:
        """Returns the names of parameters as a state has them, none twice."""
        wholes = {part: name for name in self._expansions for part in self._parts(name) or ()}
        return list(dict.fromkeys(wholes.get(name, name) for name in names))

    def _parts(self, name: str) -> tuple[str, ...] | None:
        """Returns the names of the arrays that a kernel is rounded to, or split into; None for other parameters."""
        stem, _, last = name.rpartition(".")
        if name in self._expansions:
            return f"{stem}.k_b_proj.kernel", f"{stem}.v_b_proj.kernel"
        parts = tuple(f"{stem}.{part}" for part in Fp8Kernel._fields)
        return parts if last == "kernel" and all(part in self._places for part in parts) else None

    def _rounding(
        self, name: str, kernel: Any, weight_name: str, shards: ParameterShards | None
    ) -> Callable[[], Fp8Kernel]:
        weight = self.leaves[self._places[weight_name]]
        shape = weight.shape[::-1] if shards is None else shards.shape
        dtype = getattr(kernel, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        _check(name, kernel, shape, dtype if is_float else jnp.dtype(jnp.bfloat16))
        sharding = kernel_sharding(weight)

        @functools.cache
        def rounded() -> Fp8Kernel:
            there = put_whole(kernel, sharding) if shards is None else shards.placed(kernel, sharding.mesh)
            return round_to_fp8(there)

        return rounded

    def _splitting(
        self, name: str, kernel: Any, parts: tuple[str, ...], shards: ParameterShards | None, cast: bool
    ) -> Callable[[], tuple[jax.Array, jax.Array]]:
        keys, values = (self.leaves[self._places[part]] for part in parts)
        sharding: Any = keys.sharding
        shape = (len(keys), keys.shape[1] + values.shape[1]) if shards is None else shards.shape
        _check(name, kernel, shape, _dtype_of(kernel, keys) if cast else keys.dtype)
        place = None if shards is None else functools.partial(shards.placed, mesh=sharding.mesh)
        return functools.cache(lambda: split_kernel(_bring(kernel, keys, place), *self._expansions[name]))

    def checked_scales(self, scales: KVCacheScales, dtype: str) -> Arrivals:
        """Returns the same of other scales of a cache of a dtype.

        Raises:
            InvalidInput: it is no 8-bit cache, or they are not those of the model's layers; the first one is named.
        """
        if not isinstance(scales, KVCacheScales):
            raise InvalidInput("scales", value=scales, wanted="it must be KVCacheScales")
        if dtype not in LARGEST_CODE:
            raise InvalidInput(f"the cache is {dtype}, which has no scales; EngineConfig(kv_cache_dtype='fp8') has.")
        own, values = {name for name in self._places if ".kv_scales." in name}, scales.values(dtype)
        if wrong := own.symmetric_difference(values):
            raise InvalidInput(f"scales must be of the model's {len(own) // 2} layers; {min(wrong)} is of one alone.")
        places = {self._places[name]: scale for name, scale in values.items()}
        return {
            place: functools.partial(put_whole, scale, self.leaves[place].sharding) for place, scale in places.items()
        }

    def brought(self, arrivals: Arrivals, non_finite: str = "refuse") -> list[jax.Array]:
        """Returns the leaves with others in their places; these stay as they are.

        Arrays that lie where the old ones do are taken as they are, without a copy.

        Args:
            arrivals: the others.
            non_finite: see `EngineConfig.non_finite_weights`.

        Raises:
            InvalidInput: one has numbers that are not finite.
        """
        leaves = list(self.leaves)
        for place, bring in arrivals.items():
            leaves[place] = bring()
        # Over several processes all read the same ones.
        is_known = lambda leaf, old: leaf is old and leaf.is_fully_addressable  # noqa: E731
        new = [place for place in arrivals if not is_known(leaves[place], self.leaves[place])]
        if non_finite == "accept" or are_finite([leaves[place] for place in new]):
            return leaves
        names = {place: name for name, place in self._places.items()}
        wrong = self._as_given(names[place] for place in new if not are_finite([leaves[place]]))
        problem = f"has NaN or infinite numbers, and so have {len(wrong) - 1} other parameters"
        if non_finite == "refuse":
            raise InvalidInput(wrong[0], problem, "the weights stay as they were")
        LOGGER.warning("%s of the new weights %s.", wrong[0], problem)
        return leaves

    def refuse_deleted(self) -> None:
        """Raises InvalidInput if an array was donated, as by a trainer's step: JAX's own error names none."""
        for name, place in self._places.items():
            _check_deleted(name, self.leaves[place])


def check_version(version: object) -> None:
    """Refuses a value that is no version of weights; None is the next one."""
    if version is not None:
        check_int("version", version, 0, also=", or None")


def _bring(leaf: Any, old: jax.Array, place: Callable[[Any], jax.Array] | None) -> jax.Array:
    if leaf.dtype != old.dtype:
        leaf = leaf.astype(old.dtype)
    if place is not None:
        return place(leaf)
    # What device_put returns, without its 50 us.
    return leaf if getattr(leaf, "sharding", None) == old.sharding else put_whole(leaf, old.sharding)


def _dtype_of(leaf: Any, old: jax.Array) -> Any:
    """Returns the dtype that a leaf may have: its own, if both are floating."""
    dtype = getattr(leaf, "dtype", old.dtype)
    floating = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(old.dtype, jnp.floating)
    return dtype if floating and old.dtype.itemsize > 1 else old.dtype


def are_finite(arrays: list[jax.Array]) -> bool:
    """Returns whether all numbers are finite.

    Each array is read once, and the host reads one number for all that lie on the same devices. Arrays of one kind are
    read by one program: a launch for each would take the host longer than small arrays do.
    """
    kinds: dict[Any, list[jax.Array]] = defaultdict(list)
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.floating):
            kinds[array.sharding, array.shape, array.dtype].append(array)
    found: dict[Any, Any] = {}
    for (sharding, _, _), alike in kinds.items():
        devices = frozenset(sharding.device_set)
        found[devices] = _all_finite(alike, found.get(devices, np.True_))
    return all(jax.device_get(list(found.values())))


@jax.jit
def _all_finite(arrays: list[jax.Array], before: jax.Array) -> jax.Array:
    for array in arrays:
        before &= jnp.isfinite(array.astype(jnp.float32) if array.dtype.itemsize == 1 else array).all()
    return before


def _name(path: Any) -> str:
    return ".".join(map(str, path))


def _check(name: str, leaf: Any, shape: tuple[int, ...], dtype: Any) -> None:
    found = (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
    if found != (shape, dtype):
        what = f"{found[1]}{list(found[0])}" if found[0] is not None else f"a {type(leaf).__name__}"
        raise InvalidInput(name, f"is {what}", f"the model's is {dtype}{list(shape)}")
    _check_deleted(name, leaf)


def _check_deleted(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise InvalidInput(name, "was donated or deleted", "give the array that took its place")
