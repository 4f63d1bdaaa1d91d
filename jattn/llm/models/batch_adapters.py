"""Low-rank adapters (LoRA, arXiv:2106.09685) of the parts of a decoder that a batch runs through.

The base model never changes: a batch brings its adapters' matrices, and which row has which.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.llm.models.joined import joined_sizes
from jattn.ops import AdapterRows, ExpertAdapters, add_lora_linear
from jattn.ops.activations import gated
from torch_core.base.errors import Unsupported

#: The modules outside of the layers that may have an adapter.
EMBEDDING = "embed_tokens"
HEAD = "lm_head"

# The last modules of attention and of a dense feed-forward part.
_BRANCH_ENDS = ("self_attn.o_proj", "mlp.down_proj")
# Of fewer rows the base's product is an array of its own, to which the next kernel adds the adapters' products: one
# device computes both at the same time.
_FEW_ROWS = 32
# So it is of this number, but for the last one of a branch: cuBLAS leaves some multiprocessors free, with few columns
# none. There only the adapters' first products need not wait (jaxlib 0.11.2 on an H100; 32 and 128 rows were not
# measured).
_CUBLAS_ROWS = 64
# From this number of rows on the product of gate and up is made alone, and the activation adds the adapters' products:
# with a sum XLA's search (jaxlib 0.11) took on some starts a kernel of 85 us and on others one of 79 us.
_ALONE_ROWS = 64
# Up to this number of rows XLA (jaxlib 0.11) makes one kernel of a product and the array that is added to it. For more
# it chooses a product alone by its time, and the sum of 2,048 rows takes longer than adding in place.
_FUSED_ROWS = 256


class LoraWeights(NamedTuple):
    """The matrices of a linear layer in each slot; see `jattn.ops.add_lora_linear`.

    Attributes:
        lora_a: [slots, slices * rank, in]; of experts [slots, experts, slices * rank, in]; of the embedding
            [slots, vocab_size, rank].
        lora_b: [slots, out, rank], multiplied with the adapters' scales; of experts [slots, experts, out, rank].
    """

    lora_a: jax.Array
    lora_b: jax.Array


class AdaptedBranch(NamedTuple):
    """The results of a branch's last layer and of its adapters, before their sum.

    Attributes:
        product: results of the linear layer, [..., hidden].
        x: its inputs, [..., in].
        weights, adapter_rows: the adapters.
    """

    product: jax.Array
    x: jax.Array
    weights: LoraWeights
    adapter_rows: AdapterRows

    def added(self, stream: jax.Array) -> jax.Array:
        """Returns the residual stream and the branch together.

        The adapters' products are added in the stream's memory, so that XLA's product of many rows can add itself to
        it, as it does without adapters. Of three arrays it would sum two before every norm.
        """
        num_rows = stream.size // stream.shape[-1]
        if num_rows == _CUBLAS_ROWS:
            return _added(self.x, stream + self.product, self.weights, self.adapter_rows)
        product = _apart(self.product) if num_rows < _FEW_ROWS else self.product
        return _added(self.x, stream, self.weights, self.adapter_rows) + product

    def whole(self) -> jax.Array:
        """Returns the branch."""
        return _added(self.x, self.product, self.weights, self.adapter_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer in a batch.

    Attributes:
        weights: matrices by the module's path in the layer.
        slots: int32[rows], the slot of each row.
        rows: the rows of each slot.
        attended_rows: the same of the rows that attention reads; more, if the layer picks some of its results.
    """

    weights: dict[str, LoraWeights]
    slots: jax.Array
    rows: AdapterRows
    attended_rows: AdapterRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """The adapters of a batch: matrices in slots, and the slot of each row.

    Attributes:
        layers: for each layer of the decoder, the matrices by the module's path in it.
        outside: the matrices of embedding and head by name.
        slots: int32[rows], the slot of each row; -1 for none.
        rows: the rows of each slot.
    """

    layers: tuple[dict[str, LoraWeights], ...]
    outside: dict[str, LoraWeights]
    slots: jax.Array
    rows: AdapterRows

    @classmethod
    def of(
        cls,
        layers: tuple[dict[str, LoraWeights], ...],
        outside: dict[str, LoraWeights],
        slots: jax.Array,
        num_slots: int,
    ) -> BatchAdapters:
        """Returns the adapters of rows with these slots."""
        return cls(layers, outside, slots, AdapterRows.of(slots, num_slots))

    def of_layer(self, layer: int, result_rows: jax.Array | None = None) -> LayerAdapters | None:
        """Returns the adapters of a layer, which picks the result rows behind its attention; None if it has none."""
        if not self.layers[layer]:
            return None
        slots, rows = self.slots, self.rows
        if result_rows is not None:
            slots = slots[result_rows]
            rows = AdapterRows.of(slots, rows.lora_token_start_loc.size - 1)
        return LayerAdapters(self.layers[layer], slots, rows, self.rows)

    def with_embedding(self, x: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Returns embedded tokens [..., hidden] with the products of the embedding's adapters."""
        if EMBEDDING not in self.outside:
            return x
        columns, lora_b = self.outside[EMBEDDING]
        # The first product chooses a column: it is looked up, and what is left of it multiplies by 1.
        inner = columns[jnp.maximum(self.slots, 0), token_ids.reshape(-1)]
        ones = jnp.broadcast_to(jnp.eye(inner.shape[-1], dtype=inner.dtype), (len(lora_b), *[inner.shape[-1]] * 2))
        return _added(inner.astype(x.dtype), x, LoraWeights(ones, lora_b), self.rows)

    def with_head(self, logits: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns logits [..., vocab] of hidden states [..., hidden] with the products of the head's adapters."""
        return _added(hidden, logits, self.outside[HEAD], self.rows) if HEAD in self.outside else logits


def runs_beside(num_rows: int) -> bool:
    """Whether one device runs the kernels of adapters while it computes the base's products."""
    return num_rows < _FEW_ROWS or num_rows == _CUBLAS_ROWS


def attached(layer: Any, adapters: LayerAdapters | None) -> Any:
    """Returns a copy of a layer whose linear layers add the adapters' products; the layer itself without adapters."""
    if adapters is None:
        return layer
    if layer.batch_invariant:
        raise Unsupported("adapters", "are given to a batch-invariant model", "merge them into its weights")
    layer = nnx.merge(*nnx.split(layer))
    experts: dict[str, LoraWeights] = {}
    for path, weights in adapters.weights.items():
        *front, name = path.split(".")
        parent = functools.reduce(getattr, front, layer)
        if weights.lora_a.ndim == 4:
            experts[name] = weights
        else:
            slices = joined_sizes(path, weights.lora_b.shape[1], layer.config)
            ends = path in _BRANCH_ENDS and layer.adds_branches_alone
            is_split = layer.parallel is not None
            is_attended = path.startswith("self_attn.") and name != "o_proj"
            rows = adapters.attended_rows if is_attended else adapters.rows
            adapted = _Adapted(getattr(parent, name), weights, rows, slices, is_split=is_split, ends_branch=ends)
            setattr(parent, name, nnx.static(adapted))
            if name == "gate_up_proj" and parent.is_swiglu:
                parent.gated_product = nnx.static(adapted.gated)
            if name == "kv_b_proj":
                parent.absorbed_adapters = nnx.static(adapted)
    if experts:
        first = experts.get("gate_up_proj", experts.get("up_proj"))
        layer.moe.adapters = nnx.data(ExpertAdapters(first, experts.get("down_proj"), adapters.slots))
    return layer


class _Adapted:
    """A linear layer with adapters, in the place of a module that is called.

    Args:
        linear: the module.
        weights, rows: the adapters.
        slices: outputs of each layer that it joins.
        is_split: several devices have a part each, which compute one kernel after the other.
        ends_branch: the results are an `AdaptedBranch`.
    """

    def __init__(
        self,
        linear: Any,
        weights: LoraWeights,
        rows: AdapterRows,
        slices: tuple[int, ...],
        *,
        is_split: bool,
        ends_branch: bool,
    ) -> None:
        self._linear, self._weights, self._rows, self._slices = linear, weights, rows, slices
        self._is_split, self._ends_branch = is_split, ends_branch

    @property
    def base(self) -> Any:
        """The module, for the absorbed form of latent attention."""
        return self._linear

    def __call__(self, x: jax.Array) -> Any:
        # XLA would compute the inputs twice: for the base's product, and for the kernels.
        x = jax.lax.optimization_barrier(x)
        if self._ends_branch:
            return AdaptedBranch(self._linear(x), x, self._weights, self._rows)
        rows, y = x.reshape(-1, x.shape[-1]), self._linear(x)
        # Products alone are rounded to the inputs' dtype: a router's are added in float32.
        if runs_beside(len(rows)) and not self._is_split and y.dtype == x.dtype:
            y = _apart(y)
        elif not self._adds_products or len(rows) > _FUSED_ROWS:
            return _added(x, y, self._weights, self._rows, self._slices)
        products = add_lora_linear(rows, None, *self._weights, *self._rows, output_slices=self._slices)
        return y + products.reshape(y.shape)

    def with_queries(self, latents: jax.Array, queries: jax.Array) -> jax.Array:
        """Returns queries over latents, [rows, heads, latent], with the adapters' products of queries' heads.

        Of latent attention in the absorbed form: a head's queries [rows, heads, size] are multiplied with the transpose
        of its keys' part of the kernel, and so with the transposes of both matrices in turn.
        """
        lora_a, lora_b = self._weights
        of_keys = self._by_head(queries.shape[1])[:, :, : queries.shape[2]]
        first = of_keys.swapaxes(2, 3).reshape(len(lora_b), -1, queries.shape[2])
        return self._per_head(queries, latents, first, lora_a.swapaxes(1, 2))

    def with_values(self, values: jax.Array, latents: jax.Array) -> jax.Array:
        """Returns values [rows, heads, size] with the adapters' products of attended latents [rows, heads, latent]."""
        lora_a, lora_b = self._weights
        of_values = self._by_head(values.shape[1])[:, :, -values.shape[2] :]
        return self._per_head(latents, values, lora_a, of_values.reshape(len(lora_b), -1, lora_b.shape[2]))

    def _by_head(self, num_heads: int) -> jax.Array:
        lora_b = self._weights.lora_b
        return lora_b.reshape(len(lora_b), num_heads, -1, lora_b.shape[2])

    def _per_head(self, x: jax.Array, y: jax.Array, lora_a: jax.Array, lora_b: jax.Array) -> jax.Array:
        flat, columns = x.reshape(len(x), -1), y.reshape(len(y), -1)
        return add_lora_linear(flat, columns, lora_a, lora_b, *self._rows, num_heads=x.shape[1]).reshape(y.shape)

    def gated(self, x: jax.Array) -> jax.Array:
        """Returns `silu(gate) * up` of the layer's results; of many rows, by the kernel that adds the products."""
        if x.size // x.shape[-1] < _ALONE_ROWS:
            return gated("silu", self(x))
        x = jax.lax.optimization_barrier(x)
        rows, y = x.reshape(-1, x.shape[-1]), self._linear(x)
        if len(rows) <= _FUSED_ROWS:
            products = add_lora_linear(rows, None, *self._weights, *self._rows, output_slices=self._slices)
            return gated("silu", _apart(y) + products.reshape(y.shape))
        columns, options = y.reshape(-1, y.shape[-1]), {"output_slices": self._slices, "activation": "silu"}
        out = add_lora_linear(rows, columns, *self._weights, *self._rows, **options)
        return out.reshape(*y.shape[:-1], -1)

    @property
    def _adds_products(self) -> bool:
        """Whether the base's matrix product can add the adapters' products, before it rounds its result.

        Of a base with a scale or a bias the sum would be a kernel of its own.
        """
        linear = self._linear
        return isinstance(linear, nnx.Linear) and linear.bias is None and linear.preferred_element_type is None


def _apart(product: jax.Array) -> jax.Array:
    """Returns a product to whose kernel XLA adds nothing."""
    return jax.lax.optimization_barrier(product)


def _added(
    x: jax.Array, y: jax.Array, weights: LoraWeights, rows: AdapterRows, slices: tuple[int, ...] | None = None
) -> jax.Array:
    flat, columns = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return add_lora_linear(flat, columns, *weights, *rows, output_slices=slices).reshape(y.shape)
