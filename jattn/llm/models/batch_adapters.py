"""Low-rank adapters (LoRA, arXiv:2106.09685) of the linear layers that a batch runs through.

The base model never changes: a batch brings its adapters' matrices, and which row has which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from jattn.ops import AdapterRows, add_lora_linear
from torch_core.base.errors import Unsupported


class LoraWeights(NamedTuple):
    """The matrices of a linear layer in each slot; see `jattn.ops.add_lora_linear`.

    Attributes:
        lora_a: [slots, slices * rank, in].
        lora_b: [slots, out, rank], multiplied with the adapters' scales.
    """

    lora_a: jax.Array
    lora_b: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer in a batch.

    Attributes:
        weights: matrices by the module's path in the layer.
        rows: the rows of each slot.
    """

    weights: dict[str, LoraWeights]
    rows: AdapterRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """The adapters of a batch: matrices in slots, and the slot of each row.

    Attributes:
        layers: for each layer of the decoder, the matrices by the module's path in it.
        rows: the rows of each slot.
    """

    layers: tuple[dict[str, LoraWeights], ...]
    rows: AdapterRows

    def of_layer(self, layer: int) -> LayerAdapters | None:
        """Returns a layer's adapters; None if it has none."""
        return LayerAdapters(self.layers[layer], self.rows) if self.layers[layer] else None


def attached(layer: Any, adapters: LayerAdapters | None) -> Any:
    """Returns a copy of a layer whose linear layers add the adapters' products; the layer itself without adapters."""
    if adapters is None:
        return layer
    if layer.batch_invariant:
        raise Unsupported("adapters", "are given to a batch-invariant model", "merge them into its weights")
    layer = nnx.merge(*nnx.split(layer))
    for path, weights in adapters.weights.items():
        *front, name = path.split(".")
        parent = functools.reduce(getattr, front, layer)
        adapted = _Adapted(getattr(parent, name), weights, adapters.rows, _slices(parent, weights))
        setattr(parent, name, nnx.static(adapted))
    return layer


class _Adapted:
    """A linear layer with adapters, in the place of a module that is called."""

    def __init__(
        self, linear: Callable[[jax.Array], jax.Array], weights: LoraWeights, rows: AdapterRows, slices: tuple[int, ...]
    ) -> None:
        self._linear, self._weights, self._rows, self._slices = linear, weights, rows, slices

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        if self._adds_products:
            products = add_lora_linear(rows, None, *self._weights, *self._rows, output_slices=self._slices)
            return self._linear(x) + products.reshape(*x.shape[:-1], -1)
        y = self._linear(x)
        columns = y.reshape(-1, y.shape[-1])
        adapted = add_lora_linear(rows, columns, *self._weights, *self._rows, output_slices=self._slices)
        return adapted.reshape(y.shape)

    @property
    def _adds_products(self) -> bool:
        """Whether the base's matrix product can add the adapters' products, before it rounds its result.

        XLA's GPU compiler makes one kernel of a product and the array that is added to it, whose reading then takes no
        time. Of a base with a scale or a bias the sum would be a kernel of its own.
        """
        linear = self._linear
        return isinstance(linear, nnx.Linear) and linear.bias is None and linear.preferred_element_type is None


def _slices(parent: Any, weights: LoraWeights) -> tuple[int, ...]:
    """Returns the columns of each joined layer; of a model that is split, those of the device's part."""
    count, columns = weights.lora_a.shape[1] // weights.lora_b.shape[2], weights.lora_b.shape[1]
    if count < 3:
        return (columns // count,) * count
    keys = parent.config.key_value_size
    return columns - 2 * keys, keys, keys
