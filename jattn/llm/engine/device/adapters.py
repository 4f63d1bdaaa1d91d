"""The memory of adapters on the device: slots of a fixed size, for every part of a model that may have adapters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jattn.llm.engine.device.draft import WithDraft
from jattn.llm.engine.device.placement import Placement
from jattn.llm.engine.options.config import EngineConfig
from jattn.llm.engine.request.lora import LoadedAdapter
from jattn.llm.models import (
    HEAD,
    AdapterTarget,
    BatchAdapters,
    Decoder,
    LoraWeights,
    ModelConfig,
    PagedModel,
    ParameterShards,
    adapter_targets,
    chosen_targets,
    parameter_shards,
    put_whole,
)
from jattn.pool import check_room
from torch_core.base.errors import Unsupported


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The order of the memory's arrays, two for each target and then which slots change the head, and their split.

    Attributes:
        num_layers: layers of the decoder.
        targets: the parts of the model.
        specs: partition spec of each array.
    """

    num_layers: int
    targets: tuple[AdapterTarget, ...]
    specs: tuple[PartitionSpec, ...]

    def batch(self, arrays: Sequence[jax.Array], slots: jax.Array, *, of_heads: bool = False) -> BatchAdapters:
        """Returns the adapters of a batch.

        Args:
            arrays: the memory, or a device's part of it.
            slots: int32[rows], the slot of each token, or of each hidden state for `Decoder.logits`; -1 for none.
            of_heads: the rows are such hidden states. Adapters that do not change the head have none, so that its
                matrices, which are large, are not read.
        """
        if of_heads:
            slots = jnp.where(arrays[-1][jnp.maximum(slots, 0)], slots, -1)
        layers: tuple[dict[str, LoraWeights], ...] = tuple({} for _ in range(self.num_layers))
        outside: dict[str, LoraWeights] = {}
        for index, target in enumerate(self.targets):
            own = outside if target.layer is None else layers[target.layer]
            own[target.module] = LoraWeights(*arrays[2 * index : 2 * index + 2])
        return BatchAdapters.of(layers, outside, slots, arrays[0].shape[0])


class AdapterMemory:
    """The slots of an engine's adapters.

    Args:
        model: the engine's model, on its devices.
        config: number of slots, the largest rank, and the parts that adapters may change.
        placement: the devices.

    Attributes:
        layout: the order of the arrays.
        arrays: the matrices of all slots.

    Raises:
        InvalidInput: `lora_target_modules` names a module that the model has not.
        Unsupported: the model is no decoder of `jattn.llm.models`.
        OutOfMemory: the devices lack the memory.
    """

    def __init__(self, model: PagedModel, config: EngineConfig, placement: Placement) -> None:
        base = model.base if isinstance(model, WithDraft) else model
        if not isinstance(base, Decoder):
            wanted = "a model of your own takes an adapter's number as an input: declare it in PagedSpec.inputs"
            raise Unsupported("enable_lora", f"is True and the model is a {type(base).__name__}", wanted)
        self._config, self._dtype = config, jnp.dtype(base.config.dtype)
        self._placement = placement
        shards = {} if base.parallel is None else parameter_shards(base.config, base.parallel)
        targets = engine_targets(base.config, config)
        self._shards = [self._shards_of(target, shards.get(target.kernel)) for target in targets]
        specs = tuple(PartitionSpec(None, *each.spec) for pair in self._shards for each in pair)
        self.layout = AdapterLayout(base.config.num_hidden_layers, targets, (*specs, PartitionSpec()))
        self.arrays = self._allocated()

    def warmup(self) -> None:
        """Compiles the program of `load`, by an upload to no slot."""
        self.load(self._config.max_loras, LoadedAdapter("", 0, 1, {}))

    def load(self, slot: int, adapter: LoadedAdapter) -> None:
        """Uploads an adapter; what it does not change is 0."""
        with jax.transfer_guard("allow"):
            self._load(slot, adapter)

    def _load(self, slot: int, adapter: LoadedAdapter) -> None:
        new: list[jax.Array] = []
        for target, shards in zip(self.layout.targets, self._shards, strict=True):
            for part, each in zip(self._padded(target, adapter), shards, strict=True):
                new.append(self._placed(part, each))
        changes_head = any(target.module == HEAD for target in adapter.weights)
        new.append(self._placed(np.asarray(changes_head), ParameterShards(())))
        try:
            self.arrays = _loaded(self.arrays, slot, tuple(new))
        except BaseException:
            # The old ones were given away.
            self.arrays = self._allocated()
            raise

    def _allocated(self) -> tuple[jax.Array, ...]:
        count = self._config.max_loras
        shapes = [(count, *each.cut_shape) for pair in self._shards for each in pair]
        size = 1 if self._placement.mesh is None else self._placement.mesh.size
        check_room(sum(int(np.prod(shape)) for shape in shapes) * self._dtype.itemsize // size)
        kinds: list[tuple[tuple[int, ...], Any]] = [*((shape, self._dtype) for shape in shapes), ((count,), bool)]
        shardings = [self._sharding(spec) for spec in self.layout.specs]
        return tuple(
            jnp.zeros(shape, dtype, device=sharding) for (shape, dtype), sharding in zip(kinds, shardings, strict=True)
        )

    def _sharding(self, spec: PartitionSpec) -> Any:
        mesh = self._placement.mesh
        return None if mesh is None else NamedSharding(mesh, spec)

    def _padded(self, target: AdapterTarget, adapter: LoadedAdapter) -> tuple[Any, Any]:
        """Returns the matrices of a target with the ranks of a slot."""
        shapes = self._shapes(target)
        found = adapter.weights.get(target)
        if found is None:
            return np.zeros(shapes[0], self._dtype), np.zeros(shapes[1], self._dtype)
        xp: Any = jnp if isinstance(found.lora_a, jax.Array) else np
        first, second = (xp.asarray(each).astype(self._dtype) for each in found)
        return target.padded(first, second, self._config.max_lora_rank, xp)

    def _shapes(self, target: AdapterTarget) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return target.shapes(self._config.max_lora_rank)

    def _shards_of(
        self, target: AdapterTarget, kernel: ParameterShards | None
    ) -> tuple[ParameterShards, ParameterShards]:
        """Returns how the matrices of a slot are split: the first as the kernel's inputs, the second as its outputs.

        With inputs split, each device has the product of its own, and the sum over devices that follows adds them.
        Experts are split as they are. What an embedding adds is added after the sum over its parts, so that every
        device has all of it.
        """
        first, second = self._shapes(target)
        if kernel is None or kernel.axis is None or target.is_embedding:
            return ParameterShards(first), ParameterShards(second)
        if target.num_experts:
            split = (0, kernel.order, kernel.mesh_axis)
            return ParameterShards(first, *split), ParameterShards(second, *split)
        # The kernel of a tied head is the embedding's, [out, in].
        if kernel.axis == 0 and target.layer is not None:
            return ParameterShards(first, 1, kernel.order, kernel.mesh_axis), ParameterShards(second)
        return ParameterShards(first), ParameterShards(second, 0, kernel.order, kernel.mesh_axis)

    def _placed(self, part: Any, shards: ParameterShards) -> jax.Array:
        mesh = self._placement.mesh
        if mesh is not None:
            return shards.placed(part, mesh)
        return put_whole(part, jnp.zeros(()).sharding)


def engine_targets(model: ModelConfig, config: EngineConfig) -> tuple[AdapterTarget, ...]:
    """Returns the parts of a model that the adapters of an engine may change.

    Raises:
        InvalidInput: a name that no module has.
    """
    if config.lora_target_modules is None:
        return tuple(target for target in adapter_targets(model) if not target.is_choice)
    return chosen_targets(model, config.lora_target_modules, "lora_target_modules")


@functools.partial(jax.jit, donate_argnums=0)
def _loaded(arrays: tuple[jax.Array, ...], slot: int, new: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(array.at[slot].set(each) for array, each in zip(arrays, new, strict=True))
