"""Low-rank adapters of experts: a row has those of its adapter and its expert, a pair that is a slot of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops.adapters import AdapterRows, add_lora_linear
from jattn.ops.expert_products import ExpertProduct


class ExpertAdapters(NamedTuple):
    """The adapters of a layer of experts in a batch.

    Attributes:
        gate_up: matrices of the first product in each slot and expert, [slots, experts, slices * rank, in] and
            [slots, experts, out, rank], the second multiplied with the adapters' scales; None for none. Slices are
            gate and up, or up alone.
        down: those of the second product.
        slots: int32[rows], the slot of each row; -1 for none.
    """

    gate_up: tuple[jax.Array, jax.Array] | None
    down: tuple[jax.Array, jax.Array] | None
    slots: jax.Array

    def of_rows(self, num_rows: int) -> ExpertAdapters:
        """Returns the adapters of `num_rows` rows, a multiple of the given ones, with each one's repeated."""
        return self._replace(slots=jnp.repeat(self.slots, num_rows // len(self.slots)))

    def around(
        self, gate_up: ExpertProduct, down: ExpertProduct, rows: jax.Array, experts: jax.Array
    ) -> tuple[ExpertProduct, ExpertProduct]:
        """Returns both products with the adapters' added.

        Args:
            gate_up, down: the experts.
            rows: int32[pairs], the row of each pair that is multiplied.
            experts: int32[pairs], the expert of each; no adapter is added for ids outside of the experts.
        """
        slots = self.slots[rows]
        return _around(gate_up, self.gate_up, slots, experts), _around(down, self.down, slots, experts)


@dataclass(frozen=True, slots=True)
class _AdaptedProduct:
    """The products of experts and of their adapters."""

    base: ExpertProduct
    lora_a: jax.Array
    lora_b: jax.Array
    pairs: AdapterRows

    def grouped(self, x: jax.Array, experts: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Maps rows that are sorted by expert."""
        return self._added(x, self.base.grouped(x, experts, group_sizes))

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Maps rows one by one."""
        return self._added(x, self.base.gathered(x, experts))

    def _added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        count = self.lora_a.shape[1] // self.lora_b.shape[2]
        slices = (y.shape[1] // count,) * count
        return add_lora_linear(x, y, self.lora_a, self.lora_b, *self.pairs, output_slices=slices)


def _around(
    product: ExpertProduct, weights: tuple[jax.Array, jax.Array] | None, slots: jax.Array, experts: jax.Array
) -> ExpertProduct:
    if weights is None:
        return product
    num_slots, num_experts = weights[0].shape[:2]
    is_pair = (slots >= 0) & (experts >= 0) & (experts < num_experts)
    pairs = AdapterRows.of(jnp.where(is_pair, slots * num_experts + experts, -1), num_slots * num_experts)
    lora_a, lora_b = (each.reshape(-1, *each.shape[2:]) for each in weights)
    return _AdaptedProduct(product, lora_a, lora_b, pairs)
