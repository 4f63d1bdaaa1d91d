"""Which devices an engine runs on: one, or a mesh whose axis "tp" cuts the model and the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jattn.llm.engine.device.annotated import AxisRules, is_annotated, place_annotated
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.models import Decoder, PagedModel, TensorParallel, put_whole, shard_model
from jattn.nn.paged import KVScale
from jattn.parallel import Peers
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.specs import KVCacheSpec, LatentCacheSpec

# Of weights on one device: 1 ms for a GPU that reads 4 TB/s.
_MANY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of one replica.

    Attributes:
        mesh: a mesh with only the axis "tp"; None for JAX's default device.
        splits_heads: whether the cache's heads are split over the mesh.
        by_compiler: programs are written for whole arrays, and XLA's partitioner cuts them as their arguments lie;
            otherwise each device's part is written down, for `jax.shard_map`.
    """

    mesh: Mesh | None = None
    splits_heads: bool = False
    by_compiler: bool = False

    @property
    def whole(self) -> NamedSharding | None:
        """The sharding of an array that every device has; None if there is one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def cache_spec(self, spec: KVCacheSpec | LatentCacheSpec) -> PartitionSpec:
        """Returns how a layer's cache is split: by heads, but for latents, which all heads share."""
        is_split = self.splits_heads and isinstance(spec, KVCacheSpec)
        return PartitionSpec(None, None, None, "tp") if is_split else PartitionSpec()

    def cache_sharding(self, spec: KVCacheSpec | LatentCacheSpec) -> NamedSharding | None:
        """Returns the same as a sharding; None if there is one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.cache_spec(spec))

    def put(self, array: np.ndarray) -> jax.Array:
        """Returns an array of the host on every device, committed there."""
        return put_whole(array, self.whole or jnp.zeros(()).sharding)

    def with_scales(self, model: PagedModel) -> PagedModel:
        """Returns a model whose scales of an 8-bit cache lie on every device, wherever they were made."""
        if self.whole is None:
            return model
        graph, scales, rest = nnx.split(cast(nnx.Module, model), KVScale, ...)
        placed: Any = nnx.merge(graph, jax.tree.map(functools.partial(put_whole, sharding=self.whole), scales), rest)
        return placed

    def peers(self) -> Peers | None:
        """Allocates the memory for sums of small arrays; None if XLA computes them, see `jattn.parallel.Peers`."""
        return None if self.mesh is None or self.by_compiler else Peers.of(self.mesh, "tp")

    def mapped(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns a function of all devices' arrays from one of a device's, or from one that XLA cuts (`by_compiler`).

        None of the arrays may be without elements: XLA's GPU compiler takes such an operand out of the call without
        telling Shardy, which then crashes (jax 0.11.2, from two devices on).
        """
        if self.mesh is None:
            return _with_one_device(function)
        if self.by_compiler:
            shardings = jax.tree.map(functools.partial(NamedSharding, self.mesh), out_specs)
            return lambda *operands: jax.lax.with_sharding_constraint(function(*operands), shardings)
        whole = _without_empty_constants(function)
        return jax.shard_map(whole, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @classmethod
    def of(
        cls, model: PagedModel, mesh: Mesh | None, context_size: int = 1, rules: AxisRules | None = None
    ) -> tuple[Placement, PagedModel]:
        """Returns the placement of a model and the model there, cut if it was whole.

        Args:
            model: whole, or cut over the mesh.
            mesh: a mesh with only the axis "tp"; None for JAX's default device.
            context_size: neighbours on that axis over which each sequence is spread.
            rules: see `EngineConfig.logical_axis_rules`.

        Raises:
            InvalidInput: sizes that do not divide, or a model that is split otherwise.
            Unsupported: a model without a known split.
        """
        parallel = getattr(model, "parallel", None)
        if mesh is None:
            if parallel is not None:
                wanted = "give the engine its mesh: EngineConfig(mesh=...)"
                raise InvalidInput("model", f"is cut over {parallel.size} devices", wanted)
            return cls(), _on_one_device(model)
        size = mesh.shape["tp"]
        if parallel is None and isinstance(model, Decoder) and size > 1:
            model = cast(PagedModel, shard_model(model, mesh, TensorParallel(size=size, context_size=context_size)))
        elif parallel is None and size == 1:
            graph, state = nnx.split(cast(nnx.Module, model))
            whole: Any = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, PartitionSpec())))
            model = whole
        elif parallel is None and is_annotated(model):
            return cls._annotated(model, mesh, context_size, rules)
        elif parallel is None:
            raise Unsupported(
                f"model is a {type(model).__name__}, which says not how it is cut over {size} devices. Annotate its "
                "parameters, as by nnx.with_partitioning(initializer, (None, 'tp')); or give a Decoder, or a model of "
                "one device's part with `parallel`, a jattn.llm.models.TensorParallel, and with parameters that are "
                "sharded over the engine's mesh."
            )
        found: TensorParallel = cast(Any, model).parallel if size > 1 else TensorParallel(size=1)
        if found.size != size or found.axis != "tp":
            wanted = f"the engine's mesh has {size} of 'tp'"
            raise InvalidInput("model", f"is cut over {found.size} devices of axis {found.axis!r}", wanted)
        if found.context_size != context_size:
            raise InvalidInput(
                f"model is cut with context_size {found.context_size}; decode_context_parallel_size is {context_size}. "
                f"Cut it for the engine: TensorParallel(size={size}, context_size={context_size})."
            )
        model = _along(model, mesh)
        _check_places(model, mesh)
        return cls(mesh, found.parts("heads") > 1), model

    @classmethod
    def _annotated(
        cls, model: PagedModel, mesh: Mesh, context_size: int, rules: AxisRules | None
    ) -> tuple[Placement, PagedModel]:
        spec, size = model.paged_spec, mesh.shape["tp"]
        if context_size > 1:
            problem = f"is {context_size} and the model is cut by its annotations, which split a cache by heads alone"
            raise Unsupported("decode_context_parallel_size", problem, "leave it at 1")
        splits_heads = spec.kv_lora_rank is None
        if splits_heads and spec.num_kv_heads % size:
            wanted = f"{size} devices split the cache by heads, so that they must divide them"
            raise InvalidInput("paged_spec.num_kv_heads", value=spec.num_kv_heads, wanted=wanted)
        return cls(mesh, splits_heads, by_compiler=True), place_annotated(model, mesh, rules)


def replica_meshes(config: EngineConfig) -> list[Mesh | None]:
    """Returns the mesh of each data-parallel replica; None for JAX's default device.

    Raises:
        InvalidInput: more devices than there are.
    """
    tensor, data = config.tensor_parallel_size, config.data_parallel_size
    if config.mesh is None and tensor == data == 1:
        return [None]
    devices = jax.devices() if config.mesh is None else config.mesh.devices.ravel()
    if len(devices) < tensor * data:
        problem = f"is {tensor} and data_parallel_size {data}, {tensor * data} devices in all"
        raise InvalidInput("tensor_parallel_size", problem, f"there are {len(devices)}")
    chosen = np.asarray(devices[: tensor * data], object).reshape(data, tensor)
    if config.mesh is not None and config.mesh.axis_names[0] == "tp":
        chosen = np.asarray(devices, object).reshape(tensor, data).T
    return [Mesh(row, ("tp",)) for row in chosen]


def _on_one_device(model: PagedModel) -> PagedModel:
    """Returns a model whose arrays lie on one device each: of a trainer's, which a mesh has spread, on JAX's own."""
    graph, state = nnx.split(cast(nnx.Module, model))
    leaves = jax.tree.leaves(state)
    if all(len(leaf.devices()) == 1 for leaf in leaves if isinstance(leaf, jax.Array)):
        return model
    device = jnp.zeros(()).sharding
    moved: Any = nnx.merge(graph, jax.device_put(state, device))
    return moved


def _with_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tells what is traced that the program is one device's, also where the process sees several."""

    def run(*operands: Any) -> Any:
        # An Explicit axis, the default from jax 0.11 on, would be part of the results' types, with a device there.
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("tp",), (AxisType.Auto,))):
            return function(*operands)

    return run


def _without_empty_constants(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes those where they are used: the index of `x.at[:].set(y)` is one, and would become an operand."""

    def run(*operands: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
        constants = [each if each.size else jnp.zeros(each.shape, each.dtype) for each in traced.consts]
        found = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, constants))(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def _along(model: PagedModel, mesh: Mesh) -> PagedModel:
    """Returns a model whose arrays lie along the engine's axes, where they lie so already under axes of other kinds.

    The kind that `jax.make_mesh` gives is Explicit; an engine's are Auto, and a replica's are "tp" alone.
    """

    def moved(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not set(jax.tree.leaves(tuple(sharding.spec))) <= {"tp"}:
            return leaf
        there = NamedSharding(mesh, sharding.spec)
        # Nothing is copied: the same parts are on the same devices.
        return jax.device_put(leaf, there) if there.is_equivalent_to(sharding, leaf.ndim) else leaf

    graph, state = nnx.split(cast(nnx.Module, model))
    along: Any = nnx.merge(graph, jax.tree.map(moved, state))
    return along


def _check_places(model: PagedModel, mesh: Mesh) -> None:
    # Scales of an 8-bit cache go where the engine is.
    for path, leaf in nnx.to_flat_state(nnx.state(cast(nnx.Module, model), nnx.Not(KVScale))):
        sharding = getattr(nnx.as_pure(leaf), "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            wanted = _devices_of(NamedSharding(mesh, PartitionSpec()))
            raise InvalidInput(
                f"{'.'.join(map(str, path))} lies on {_devices_of(sharding)}; the engine's mesh has {wanted}. Shard "
                "the whole model over the engine's mesh, or give it as it is."
            )


def _devices_of(sharding: Any) -> str:
    """Returns the devices of a sharding in the mesh's order, in which parts lie on them."""
    found: Any = getattr(sharding, "device_set", ())
    if isinstance(sharding, NamedSharding):
        found = cast(Mesh, sharding.mesh).devices.ravel()
    return f"devices {', '.join(str(device.id) for device in found)}" if len(found) else str(sharding)


def outlasts_the_host(leaves: Sequence[jax.Array]) -> bool:
    """Returns whether a token takes the device longer than the host, whose work need not be shared by several.

    A program of one token is 2 to 3% faster on the device than one of four is for each of its tokens.
    """
    if not any(device.platform == "gpu" for leaf in leaves for device in leaf.devices()):
        return False
    return sum(map(shard_bytes, leaves)) >= _MANY_BYTES


def shard_bytes(leaf: jax.Array) -> int:
    """Returns the bytes that one device has of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
