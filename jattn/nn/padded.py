"""Between the padded batches of Flax and the packed tokens of the ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from torch_core.base.errors import InvalidInput

__all__ = ["Packing", "flat_lengths", "real_tokens"]


class Packing(NamedTuple):
    """Which tokens of a padded batch are real, and where they lie among the packed ones.

    Attributes:
        start_loc: int32[batch + 1], running sum of the lengths.
        order: int32[batch * length], the padded place of each packed token; None where all tokens are real: then
            packing is a change of shape and costs nothing.
        real: bool[batch * length]; None likewise.
    """

    start_loc: jax.Array
    order: jax.Array | None = None
    real: jax.Array | None = None

    @classmethod
    def of(cls, batch: int, length: int, real: jax.Array | None = None) -> Packing:
        """Packs a batch; `real` is bool[batch, length], None for all tokens."""
        if real is None:
            return cls(jnp.arange(batch + 1, dtype=jnp.int32) * length)
        start_loc = jnp.pad(jnp.cumsum(real.sum(1, dtype=jnp.int32), dtype=jnp.int32), (1, 0))
        return cls(start_loc, jnp.argsort(~real.reshape(-1), stable=True), real.reshape(-1))

    def pack(self, padded: jax.Array) -> jax.Array:
        """Returns [batch, length, ...] as [batch * length, ...], each row's real tokens after the last row's."""
        tokens = padded.reshape(-1, *padded.shape[2:])
        return tokens if self.order is None else tokens[self.order]

    def unpack(self, packed: jax.Array) -> jax.Array:
        """Returns packed tokens in their padded places, [batch * length, ...]; 0 where no real token is."""
        if self.real is None:
            return packed
        found = packed[jnp.maximum(jnp.cumsum(self.real) - 1, 0)]
        return jnp.where(self.real.reshape(-1, *(1,) * (packed.ndim - 1)), found, 0)


def flat_lengths(name: str, lengths: Any, batch_dims: tuple[int, ...], longest: int) -> jax.Array | None:
    """Returns the lengths of a batch's rows as one axis; None where there are none.

    Raises:
        InvalidInput: they are not integers, not one for each row, or, outside jit, not from 0 to `longest`: those on a
            device are waited for, as the ops wait for theirs.
    """
    if lengths is None:
        return None
    # Traced arrays have no values; others are fetched explicitly, which a transfer guard allows.
    found = None if isinstance(lengths, Tracer) else np.asarray(jax.device_get(lengths)).reshape(-1)
    lengths = jnp.asarray(lengths)
    if lengths.shape != batch_dims or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InvalidInput(
            f"{name} is {lengths.dtype}{list(lengths.shape)}; it must be int32{list(batch_dims)}, one for each row."
        )
    if found is not None and ((found < 0) | (found > longest)).any():
        row = np.argmax((found < 0) | (found > longest))
        raise InvalidInput(
            f"{name} of row {row} is {found[row]}; it must be from 0 to {longest}, the tokens of a padded row."
        )
    return lengths.reshape(-1)


def real_tokens(lengths: jax.Array | None, length: int) -> jax.Array | None:
    """Returns bool[batch, length], the tokens before each row's end; None where every token is real."""
    return None if lengths is None else jnp.arange(length) < lengths[:, None]
