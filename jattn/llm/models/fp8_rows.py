"""Rows that stay e4m3 numbers from one part of a decoder layer to the next one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.ops import QuantizedRows, row_quantize


class UnscaledProduct(NamedTuple):
    """A product of e4m3 numbers before its scales; the part that reads it multiplies.

    Attributes:
        values: bfloat16[padded_rows, out], undefined from the number of rows on.
        row_scale: float32[num_rows].
        column_scale: float32[out].
    """

    values: jax.Array
    row_scale: jax.Array
    column_scale: jax.Array

    def scaled(self) -> jax.Array:
        """Returns the product, `[num_rows, out]`."""
        wide = self.values[: len(self.row_scale)].astype(jnp.float32)
        return (wide * self.row_scale[:, None] * self.column_scale).astype(self.values.dtype)

    def gated(self, activation: str) -> QuantizedRows:
        """Returns the rows after a gated activation."""
        values, row_scale, column_scale = self
        return row_quantize(values, row_scale=row_scale, column_scale=column_scale, activation=activation)[0]


class QuantizingNorm(nnx.Module):
    """A norm whose results are rows for layers of `Fp8Linear`: one launch rounds them, and adds to the stream before.

    Args:
        norm: an `RMSNorm`.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, x: jax.Array) -> QuantizedRows:
        """Normalises rows `[num_rows, features]`."""
        return row_quantize(x, **self._options)[0]

    def of_added(self, branch: UnscaledProduct, stream: jax.Array) -> tuple[jax.Array, QuantizedRows]:
        """Returns stream + branch, and its norm."""
        scales = {"row_scale": branch.row_scale, "column_scale": branch.column_scale}
        rows, after = row_quantize(branch.values, residual=stream, **scales, **self._options)
        return after, rows

    @property
    def _options(self) -> dict[str, Any]:
        return {"weight": self.norm.weight[...], "epsilon": self.norm.epsilon, "norm_type": self.norm.norm_type}
