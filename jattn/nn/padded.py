"""Conversion between the padded batches of Flax and the packed tokens of the ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from torch_core.base.errors import InvalidInput


class Packing(NamedTuple):
    """The real tokens of a padded batch, and their order when packed; `start_loc` is the cumulative sum of the lengths.

    `order` is the padded index of each packed token, and `real` marks the real ones, [batch * length] each. Both are
    None if all tokens are real: packing is then a reshape and costs nothing.
    """

    start_loc: jax.Array
    order: jax.Array | None = None
    real: jax.Array | None = None

    @classmethod
    def of(cls, batch: int, length: int, real: jax.Array | None = None) -> Packing:
        """Returns the packing of a batch; `real` is bool[batch, length], None if all tokens are real."""
        if real is None:
            return cls(jnp.arange(batch + 1, dtype=jnp.int32) * length)
        start_loc = jnp.pad(jnp.cumsum(real.sum(1, dtype=jnp.int32), dtype=jnp.int32), (1, 0))
        return cls(start_loc, jnp.argsort(~real.reshape(-1), stable=True), real.reshape(-1))

    def pack(self, padded: jax.Array) -> jax.Array:
        """Packs [batch, length, ...] to [batch * length, ...]: the real tokens of all rows first, then the padding."""
        tokens = padded.reshape(-1, *padded.shape[2:])
        return tokens if self.order is None else tokens[self.order]

    def unpack(self, packed: jax.Array) -> jax.Array:
        """Returns packed tokens in padded order, [batch * length, ...]; padding is 0."""
        if self.real is None:
            return packed
        padded = packed[jnp.maximum(jnp.cumsum(self.real) - 1, 0)]
        return jnp.where(self.real.reshape(-1, *(1,) * (packed.ndim - 1)), padded, 0)


def flat_lengths(name: str, lengths: Any, batch_dims: tuple[int, ...], longest: int) -> jax.Array | None:
    """Checks the lengths of the rows of a batch and returns them with one axis; None for None.

    Outside jit it also checks that each is from 0 to `longest`; the host waits for lengths on a device.
    """
    if lengths is None:
        return None
    # A traced array has no values. An explicit transfer passes a transfer guard.
    values = None if isinstance(lengths, Tracer) else np.asarray(jax.device_get(lengths)).reshape(-1)
    lengths = jnp.asarray(lengths)
    if lengths.shape != batch_dims or not jnp.issubdtype(lengths.dtype, jnp.integer):
        wanted = f"it must be int32{list(batch_dims)}, one for each row"
        raise InvalidInput(name, f"is {lengths.dtype}{list(lengths.shape)}", wanted)
    if values is not None and ((values < 0) | (values > longest)).any():
        row = np.argmax((values < 0) | (values > longest))
        wanted = f"it must be from 0 to {longest}, the tokens of a padded row"
        raise InvalidInput(name, f"of row {row} is {values[row]}", wanted)
    return lengths.reshape(-1)


def real_tokens(lengths: jax.Array | None, length: int) -> jax.Array | None:
    """Returns bool[batch, length], the real tokens; None if lengths is None: all tokens are real."""
    return None if lengths is None else jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
