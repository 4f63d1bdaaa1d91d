"""Low-rank adapters of experts: a row has those of its adapter and its expert, a pair that is a slot of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.ops.adapters import AdapterRows, add_lora_linear


class ExpertAdapters(NamedTuple):
    """The adapters of a layer of experts in a batch.

    Attributes:
        gate_up: matrices of the first product in each slot and expert, [slots, experts, slices * rank, in] and
            [slots, experts, out, rank], the second multiplied with the adapters' scales; None for none. Slices are gate
            and up, or up alone.
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
        self, routed: Callable[[jax.Array | None], tuple[jax.Array, jax.Array]], rows: jax.Array, weights: jax.Array,
        experts: jax.Array, num_experts: int, *, implementation: str | None = None,
    ) -> jax.Array:  # fmt: skip
        """Returns the weighted sums of the outputs of each row's experts with the adapters' products.

        Args:
            routed: returns the sums of the experts alone, [rows, hidden], and the inputs of their second products,
                [rows, top_k, in]; takes what is added to the first ones, [rows, top_k, out], or None.
            rows: `[rows, hidden]`.
            weights: `[rows, top_k]`.
            experts: int32 `[rows, top_k]`; no adapter is added for ids outside of the experts.
            num_experts: number of experts.
            implementation: as in `add_lora_linear`.
        """
        is_expert = (experts >= 0) & (experts < num_experts)
        slots = self.slots[:, None]
        pairs = jnp.where(is_expert & (slots >= 0), slots * num_experts + experts, -1).reshape(-1)
        num_slots = next(len(weights[0]) for weights in (self.gate_up, self.down) if weights is not None)
        order = AdapterRows.of(pairs, num_slots * num_experts)
        added = None
        if self.gate_up is not None:
            added = _products(rows, self.gate_up, order, implementation).reshape(*experts.shape, -1)
        out, activated = routed(added)
        if self.down is None:
            return out
        added = _products(activated.reshape(experts.size, -1), self.down, order, implementation)
        added, weights = added.reshape(*experts.shape, -1), jnp.where(is_expert, weights, 0).astype(out.dtype)
        return out + jnp.einsum("tk,tkh->th", weights, added, preferred_element_type=out.dtype)


def _products(
    x: jax.Array, weights: tuple[jax.Array, jax.Array], rows: AdapterRows, implementation: str | None
) -> jax.Array:
    lora_a, lora_b = (each.reshape(-1, *each.shape[2:]) for each in weights)
    count = lora_a.shape[1] // lora_b.shape[2]
    slices = (lora_b.shape[1] // count,) * count
    options = {"output_slices": slices, "implementation": implementation}
    return add_lora_linear(x, None, lora_a, lora_b, *rows, **options)
