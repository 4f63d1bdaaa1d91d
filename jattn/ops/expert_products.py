"""The linear maps of experts: grouped, or row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax


class ExpertProduct(Protocol):
    """One linear map for each expert, computed in two ways."""

    def grouped(self, x: jax.Array, experts: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` that are sorted by expert, `group_sizes` of them for each."""
        ...

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Maps rows `[rows, in]` one by one, each with its own expert."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """`x @ kernel[expert] + bias[expert]`.

    Attributes:
        kernel: float[experts, in, out].
        bias: float[experts, out], or None.
    """

    kernel: jax.Array
    bias: jax.Array | None

    def grouped(self, x: jax.Array, experts: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """One ragged product."""
        return self._biased(jax.lax.ragged_dot(x, self.kernel, group_sizes), experts)

    def gathered(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """Reads the experts that are hit, no others."""

        def one_row(arguments: tuple[jax.Array, jax.Array]) -> jax.Array:
            row, expert = arguments
            return row @ jax.lax.dynamic_index_in_dim(self.kernel, expert, keepdims=False)

        return self._biased(jax.lax.map(one_row, (x, experts)), experts)

    def _biased(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        return x if self.bias is None else x + self.bias[experts]
