"""Segments of the padded batches of Flax: ids of their tokens, positions in them, and masks that say the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from torch_core.base.errors import InvalidInput


class Segments(NamedTuple):
    """The segments of a batch; ids of 0 and below are padding."""

    ids: jax.Array  # int32[batch, length]
    key_ids: jax.Array | None  # int32[batch, key_length]; None for the same as `ids`
    max_segments: int | None  # as in `jattn.attention`

    @classmethod
    def of(
        cls,
        segment_ids: Any,
        key_segment_ids: Any,
        max_segments: int | None,
        query_dims: tuple[int, ...],
        key_dims: tuple[int, ...],
    ) -> Segments | None:
        """Checks ids of [batch..., length] and [batch..., key_length]; None if there are none."""
        if segment_ids is None:
            if key_segment_ids is not None or max_segments is not None:
                name = "max_segments" if key_segment_ids is None else "key_segment_ids"
                raise InvalidInput(name, "is given without segment_ids", "pass both, or leave it out")
            return None
        if key_segment_ids is None and key_dims != query_dims:
            problem = f"is missing for {key_dims[-1]} keys of {query_dims[-1]} queries"
            raise InvalidInput("key_segment_ids", problem, "pass the ids of the keys")
        ids = _flat("segment_ids", segment_ids, query_dims)
        key_ids = None if key_segment_ids is None else _flat("key_segment_ids", key_segment_ids, key_dims)
        return cls(ids, key_ids, max_segments)

    @property
    def pair(self) -> tuple[jax.Array, jax.Array]:
        """The ids of queries and of keys."""
        return self.ids, self.ids if self.key_ids is None else self.key_ids

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `jattn.attention` for the packed tokens of the batch."""
        key_ids = None if self.key_ids is None else self.key_ids.reshape(-1)
        return {"segment_ids": self.ids.reshape(-1), "key_segment_ids": key_ids, "max_segments": self.max_segments}


def positions_in_segments(ids: jax.Array | None) -> jax.Array | None:
    """Returns int32[batch..., length], positions that count from 0 in each segment; None for None.

    Example:
        >>> positions_in_segments(jnp.array([[0, 0, 1, 1, 1, 2]])).tolist()
        [[0, 1, 0, 1, 2, 0]]
    """
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    tokens = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    starts = jnp.concatenate([jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1)
    return tokens - jax.lax.cummax(jnp.where(starts, tokens, 0), axis=ids.ndim - 1)


def segments_of_mask(mask: Any) -> tuple[Segments, bool] | None:
    """Returns the segments that a mask of known values describes, and whether it is causal; None for another mask.

    Args:
        mask: bool[batch, 1, length, length].

    Example:
        >>> documents = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)
        >>> segments, causal = segments_of_mask(np.tril(documents)[None, None])
        >>> segments.ids.tolist(), causal
        ([[1, 1, 2]], True)
    """
    if isinstance(mask, Tracer) or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    # An explicit transfer passes a transfer guard.
    values = np.asarray(jax.device_get(mask))[:, 0]
    seen = np.asarray(values.any(2))
    ids = np.where(seen, np.cumsum(seen & (values.argmax(2) == np.arange(mask.shape[2])), axis=1), 0)
    pairs = (ids[:, :, None] == ids[:, None]) & seen[:, :, None]
    causal = next(
        (causal for causal in (True, False) if np.array_equal(values, np.tril(pairs) if causal else pairs)), None
    )
    if causal is None:
        return None
    return Segments(jnp.asarray(ids, jnp.int32), None, max(1, int(ids.max(initial=0)))), causal


def _flat(name: str, given: Any, dims: tuple[int, ...]) -> jax.Array:
    ids = jnp.asarray(given)
    if ids.shape != dims or not jnp.issubdtype(ids.dtype, jnp.integer):
        wanted = f"it must be int32{list(dims)}, one id for each token"
        raise InvalidInput(name, f"is {ids.dtype}{list(ids.shape)}", wanted)
    return ids.astype(jnp.int32).reshape(-1, dims[-1])
