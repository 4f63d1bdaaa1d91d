"""Where each parameter of a decoder goes when the decoder is split over a mesh axis, and the cutting itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jattn.llm.models.config import ModelConfig
from jattn.llm.models.decoder import Decoder
from jattn.llm.models.encoder_decoder import build_model
from jattn.llm.models.invariance import set_batch_invariant
from jattn.llm.models.joined import shared_sizes
from jattn.llm.models.mixers import STATE_CONFIGS
from jattn.llm.models.quantized import Fp8Kernel, QuantizedExpertLinear, QuantizedLinear, quantized_linear
from jattn.llm.models.shapes import ParameterPath, parameter_shapes
from jattn.llm.models.tensor_parallel import TensorParallel, logical_axes
from jattn.nn.scan import paged_layers
from jattn.nn.states import unused_columns
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

#: Axes of parameters of mixers that keep a state, by mixer and module or by leaf; a trainer's mesh does not split them.
_STATE_AXES: Mapping[tuple[str, str] | str, tuple[str | None, ...]] = MappingProxyType(
    {
        ("conv", "conv"): ("heads", None),
        ("linear_attn", "conv1d"): ("heads", None),
        ("kda", "conv1d"): ("heads", None),
        ("mamba", "conv1d"): ("heads", None),
        ("kda", "f_b_proj"): (None, "heads"),
        ("kda", "g_b_proj"): (None, "heads"),
        ("lightning", "output_gate"): (None, "heads"),
        ("lightning", "norm"): ("heads",),
        ("mamba", "norm"): ("heads",),
        "A_log": ("heads",),
        "D": ("heads",),
        "dt_bias": ("heads",),
        "slope_rate": ("heads",),
    }
)
#: The index of an element that a device has and the parameter does not have: 0.
_NONE = -1


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """The split of one parameter: the devices' parts, one after the other, form an array that a mesh axis splits
    evenly.

    Attributes:
        shape: shape of the whole parameter.
        axis: the split axis; None for a parameter that every device has.
        order: for each element of that axis, as devices have them, its place in the parameter, -1 for a zero; None
            if they are in order. Elements of the parameter that no device has are zeros.
        mesh_axis: the mesh axis that splits it.
    """

    shape: tuple[int, ...]
    axis: int | None = None
    order: np.ndarray | None = field(default=None, compare=False)
    mesh_axis: str = "tp"

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the array of all parts."""
        return PartitionSpec() if self.axis is None else PartitionSpec(*[None] * self.axis, self.mesh_axis)

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Shape of the array of all parts."""
        if self.axis is None or self.order is None:
            return self.shape
        return (*self.shape[: self.axis], len(self.order), *self.shape[self.axis + 1 :])

    def placed(self, array: jax.Array | np.ndarray, mesh: Mesh) -> jax.Array:
        """Returns the parts of a whole parameter, each on its device.

        From a device the parameter first goes to every device of the mesh, whole, and each keeps its own part. Over
        several processes each gives the whole, or all give an array that is spread over them.
        """
        sharding = NamedSharding(mesh, self.spec)
        if self.order is None:
            return put_whole(array, sharding)
        if not _moves(array, sharding):
            take: Any = jnp.take if isinstance(array, jax.Array) else np.take

            def some(axis: int | None, places: np.ndarray) -> np.ndarray:
                return np.asarray(array if axis is None else take(array, places, axis))

            return self.loaded(some, array.dtype, mesh)
        everywhere = jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
        return _taken(sharding, self.axis)(everywhere, self.order)

    def whole(self, array: jax.Array | np.ndarray) -> np.ndarray:
        """Returns the whole parameter of the parts; the inverse of `placed`."""
        parts = np.asarray(array)
        if self.axis is None or self.order is None:
            return parts
        own = np.flatnonzero(self.order != _NONE)
        places = np.full(self.shape[self.axis], _NONE)
        places[self.order[own]] = own
        found = parts.take(places, self.axis)
        found[(slice(None),) * self.axis + (places == _NONE,)] = 0
        return found

    def loaded(
        self, read: Callable[[int | None, np.ndarray], np.ndarray], dtype: np.dtype | Any, mesh: Mesh
    ) -> jax.Array:
        """Returns the parts, of which each device's alone is read.

        `read(axis, places)` returns those places of the parameter along an axis; all of it for None.
        """

        def part(index: Any) -> np.ndarray:
            if self.axis is None:
                return np.array(read(None, np.arange(0)), dtype)
            places = np.arange(self.shape[self.axis]) if self.order is None else self.order
            places = places[index[self.axis]]
            found = np.array(read(self.axis, np.maximum(places, 0)), dtype)
            found[(slice(None),) * self.axis + (places == _NONE,)] = 0
            return found

        return jax.make_array_from_callback(self.cut_shape, NamedSharding(mesh, self.spec), part)


def put_whole(array: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns an array as a sharding has it. Over several processes each gives the whole, or all one that is spread."""
    if _moves(array, sharding):
        return jax.device_put(array, sharding)
    # A copy: XLA's CPU backend would go on reading the caller's own memory.
    host = np.array(array)
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


def tensor_parallel_of(mesh: Mesh, parallel: TensorParallel | None = None) -> TensorParallel:
    """Returns how a decoder is split over a mesh: as asked, or over its axis "tp" by Megatron's rules.

    Raises:
        InvalidInput: the mesh does not have the axis, or has it in another size.
    """
    axis = "tp" if parallel is None else parallel.axis
    if not isinstance(mesh, Mesh) or axis not in mesh.shape:
        axes = getattr(mesh, "shape", {})
        found = ", ".join(f"{name} ({size})" for name, size in axes.items()) or shown(mesh)
        raise InvalidInput("mesh", f"has no axis {axis!r}", f"it has {found}. Name it: jax.make_mesh(..., ({axis!r},))")
    size = mesh.shape[axis]
    if parallel is not None and parallel.size != size:
        raise InvalidInput("tensor_parallel.size", f"is {parallel.size}", f"mesh axis {axis!r} has {size} devices")
    return TensorParallel(size=size) if parallel is None else parallel


def parameter_shards(config: ModelConfig, parallel: TensorParallel) -> dict[ParameterPath, ParameterShards]:
    """Returns how every parameter of a decoder is split, from its config alone.

    Raises:
        InvalidInput: sizes that do not divide.

    Example:
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=1, head_dim=16)
        >>> shards = parameter_shards(config, TensorParallel(size=2))
        >>> fused = shards["layers", 0, "self_attn", "qkv_proj", "kernel"]
        >>> fused.shape, fused.cut_shape, tuple(fused.spec)
        ((64, 96), (64, 128), (None, 'tp'))
    """
    parallel.check(config)
    cutters = [_Cutter(config.of_layer(layer), parallel) for layer in range(config.num_hidden_layers)]
    outside = _Cutter(config, parallel)
    return {
        path: (cutters[cast(int, path[1])] if path[0] == "layers" else outside).shards(path, shape)
        for path, shape in parameter_shapes(config).items()
    }


def shard_model(model: Decoder, mesh: Mesh, parallel: TensorParallel | None = None) -> Decoder:
    """Returns a decoder that is split over a mesh axis, for `jattn.llm.engine.Engine` and for `jax.shard_map`.

    Its parameters are the devices' parts side by side, in an order of their own: `update_weights` and `save_model` take
    and give whole models.

    Args:
        model: a whole decoder; its arrays stay as they are.
        mesh: a mesh with the axis of `parallel`.
        parallel: the split; None for all devices of axis "tp", by Megatron's rules.

    Raises:
        InvalidInput: the mesh lacks the axis or has it in another size, sizes that do not divide, or a model that is
            cut already.
        Unsupported: weights that stay as they are stored.
    """
    if model.parallel is not None:
        raise InvalidInput(f"model is cut already, over {model.parallel.size} devices; give the whole one.")
    for path, module in nnx.iter_modules(model):
        if isinstance(module, QuantizedLinear | QuantizedExpertLinear):
            raise Unsupported(
                f"{'.'.join(map(str, path))} has weights that stay as they are stored, which are not cut over devices. "
                "Load the model with quantization='fp8', or without, or run it on one device."
            )
    parallel = tensor_parallel_of(mesh, parallel)
    shards = parameter_shards(model.config, parallel)
    flat: Any = nnx.to_flat_state(nnx.state(model))
    whole = {path: nnx.as_pure(leaf) for path, leaf in flat}
    values = {path: _placed(path, each, whole, mesh) for path, each in shards.items()}
    cut = decoder_of(model.config, values, model.implementation, parallel)
    carried = {path: layer.kv_scales for path, layer in paged_layers(model)}
    for path, layer in paged_layers(cut):
        if (scales := carried[path]) is not None:
            layer.kv_scales = scales
    if model.batch_invariant:
        set_batch_invariant(cut)
    return cut


def decoder_of(
    config: ModelConfig,
    values: Mapping[ParameterPath, jax.Array | tuple[jax.Array, ...]],
    implementation: str | None,
    parallel: TensorParallel | None = None,
) -> Decoder:
    """Makes the model of a config around the given parameters, without ever initialising random ones.

    A parameter of several arrays, of a quantised kernel, makes a quantised module of its own; see `quantized_linear`.
    """
    options: dict[str, Any] = {"implementation": implementation}
    make = build_model if parallel is None else functools.partial(Decoder, parallel=parallel)
    abstract = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0), **options))
    values = dict(values)
    for path in [path for path, value in values.items() if isinstance(value, tuple)]:
        (*front, name, _), parent = path, cast(Any, abstract)
        for key in front:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        name, parts = str(name), cast(Any, values.pop(path))
        module, names = quantized_linear(getattr(parent, name), parts, values.get((*front, name, "bias")))
        setattr(parent, name, module)
        values |= {(*front, name, part): array for part, array in zip(names, parts, strict=True)}
    graph, state = nnx.split(abstract)
    flat: Any = nnx.to_flat_state(state)
    filled = [(path, variable.replace(values[path])) for path, variable in flat]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _moves(array: jax.Array | np.ndarray, sharding: Sharding) -> bool:
    """Whether `device_put` is for it: from the host, or from one process to several, it compares all their values."""
    return isinstance(array, jax.Array) and array.is_fully_addressable == sharding.is_fully_addressable


def _placed(
    path: ParameterPath, shards: ParameterShards, whole: Mapping[ParameterPath, jax.Array], mesh: Mesh
) -> jax.Array | Fp8Kernel:
    """Returns the parts of a parameter of a whole model, or of the kernel of an `Fp8Linear`."""
    if path in whole:
        return shards.placed(whole[path], mesh)
    weight, scale = (whole[*path[:-1], name] for name in Fp8Kernel._fields)
    (_, outputs), axis = shards.shape, shards.axis
    turned = replace(shards, shape=shards.shape[::-1], axis=None if axis is None else 1 - axis)
    order = np.tile(np.arange(outputs), mesh.shape[shards.mesh_axis]) if axis == 0 else shards.order
    scales = ParameterShards((outputs,), None if axis is None else 0, order, shards.mesh_axis)
    return Fp8Kernel(turned.placed(weight, mesh), scales.placed(scale, mesh))


class _Cutter:
    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        self._config, self._parallel = config, parallel
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts, each = parallel.parts("heads"), parallel.kv_heads(config)
        self._heads = np.arange(heads).reshape(parts, -1)
        # Of fewer heads than devices each has a copy on neighbours, whose query heads are its group.
        self._kv_heads = np.arange(parts)[:, None] * kv_heads // parts + np.arange(each)

    def shards(self, path: ParameterPath, shape: tuple[int, ...]) -> ParameterShards:
        parallel, (*_, module, leaf) = self._parallel, ("", *path)
        axes = logical_axes(path, len(shape))
        mixer = next((str(name) for name in path if name in STATE_CONFIGS), None)
        if mixer is not None:
            axes = _STATE_AXES.get((mixer, str(module)), _STATE_AXES.get(str(leaf), axes))[: len(shape)]
        if self._config.qk_norm == "all" and module in ("q_norm", "k_norm"):
            axes = ("heads",)
        split = [(index, name) for index, name in enumerate(axes) if name is not None and parallel.rules[name]]
        if split:
            ((axis, name),) = split
            order = (
                self._order(path, name, shape[axis]) if mixer is None else self._state_order(mixer, path, shape[axis])
            )
            return ParameterShards(shape, axis, order, parallel.axis)
        summed = {"o_proj": "heads", "out_proj": "heads", "down_proj": "mlp"}.get(str(module))
        if leaf == "bias" and len(shape) == 1 and summed and parallel.parts(summed) > 1:
            # Added on each device before the sum: the first one has it, the others have zeros.
            order = np.pad(np.arange(shape[0]), (0, (parallel.size - 1) * shape[0]), constant_values=_NONE)
            return ParameterShards(shape, 0, order, parallel.axis)
        return ParameterShards(shape)

    def _order(self, path: ParameterPath, name: str, length: int) -> np.ndarray | None:
        (*_, module, _), config = path, self._config
        if module == "qkv_proj":
            gates = config.query_size * config.attn_output_gate
            # None of keys and values of another layer, and none of values that are projected apart or not at all.
            count = (length - config.query_size - gates) // config.key_value_size
            owners = (self._heads, *[self._kv_heads] * count, *[self._heads] * config.attn_output_gate)
            ends = config.query_size + config.key_value_size * np.arange(count + 1)
            by_head = np.split(np.arange(length), ends[: len(owners) - 1])
            return _dealt(
                (part.reshape(-1, config.head_dim), heads) for part, heads in zip(by_head, owners, strict=True)
            )
        if module in ("k_norm", "v_proj"):
            return np.arange(length).reshape(config.num_key_value_heads, -1)[self._kv_heads].ravel()
        if module == "gate_up_proj" and name == "mlp":
            return np.arange(length).reshape(2, self._parallel.parts(name), -1).swapaxes(0, 1).ravel()
        if name == "vocab":
            padded = self._parallel.vocab(length) * self._parallel.parts(name)
            return None if padded == length else np.pad(np.arange(length), (0, padded - length), constant_values=_NONE)
        return None

    def _state_order(self, mixer: str, path: ParameterPath, length: int) -> np.ndarray | None:
        """Returns the order of an axis of a mixer that keeps a state: some of its parts are one after the other."""
        config, count, module = self._config, self._parallel.parts("heads"), path[-2]
        is_input, is_conv = module == "in_proj", module == "conv1d"
        if not (is_input or is_conv):
            return None
        each, everywhere, multiple = np.arange(count)[:, None], np.zeros((count, 1), int), 1
        # Sizes of the parts, and the devices' shares of each: an equal one, or all of it.
        parts = [(length // 3, count, each)] * 3
        if (delta := config.delta_net) is not None and mixer == "linear_attn":
            parts = [(size, count, each) for size in delta.input_sizes[: None if is_input else 3]]
        elif (kimi := config.kimi_delta) is not None and mixer == "kda" and is_input:
            size = kimi.num_heads * kimi.head_dim
            gates = [(size, count, each)] * 2 if kimi.full_rank_gates else [(2 * kimi.head_dim, 1, everywhere)]
            parts = [(size, count, each)] * 3 + gates + [(kimi.num_heads, count, each)]
        elif (mamba := config.mamba) is not None and mixer == "mamba":
            inner, groups = mamba.num_heads * mamba.head_dim, mamba.num_groups
            # Of fewer groups than devices each has a copy on neighbours, whose heads are its own.
            owners = each * groups // count + np.arange(max(groups // count, 1))
            shared = [(groups * mamba.state_size, groups, owners)] * 2
            parts = [(inner, count, each)] * (1 + is_input) + shared + [(mamba.num_heads, count, each)] * is_input
            if is_input and (shared_with := shared_sizes(config)) is not None:
                owners = (self._heads, self._kv_heads, self._kv_heads)
                numbers = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
                parts = [*zip(shared_with[:3], numbers, owners, strict=True), *parts]
                multiple = config.head_dim
        ends = np.cumsum([size for size, *_ in parts])
        columns = np.split(np.arange(length), ends)[:-1]
        dealt = ((some.reshape(n, -1), owners) for some, (_, n, owners) in zip(columns, parts, strict=True))
        order = _dealt(dealt).reshape(count, -1)
        # Those of a short convolution are split in three.
        unused = unused_columns(order.shape[1], multiple) if is_input and mixer != "conv" else 0
        return np.pad(order, ((0, 0), (0, unused)), constant_values=_NONE).ravel()


def _dealt(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns the places that devices have, one device after the other.

    Args:
        parts: the places of each head, [heads, places], and the heads that each device has, [devices, heads].
    """
    return np.concatenate([part[heads].reshape(len(heads), -1) for part, heads in parts], axis=1).ravel()


@functools.lru_cache(maxsize=64)
def _taken(sharding: NamedSharding, axis: int) -> Any:
    def take(array: jax.Array, order: jax.Array) -> jax.Array:
        found = jnp.take(array, jnp.maximum(order, 0), axis)
        shape = [-1 if dim == axis else 1 for dim in range(array.ndim)]
        return jnp.where((order == _NONE).reshape(shape), 0, found)

    return jax.jit(take, out_shardings=sharding)
