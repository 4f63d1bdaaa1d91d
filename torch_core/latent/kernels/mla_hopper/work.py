"""Sizes and shared memory of the Hopper latent kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

__all__ = ["ROPES", "ROWS", "SLOTS", "Room", "Source"]

#: Rows (query token, head) of a program.
ROWS = gl.constexpr(64)
#: Halves of tiles, and rotary parts of tiles, that shared memory has room for.
SLOTS = gl.constexpr(5)
ROPES = gl.constexpr(3)


class Room(NamedTuple):
    """Shared memory.

    Attributes:
        latents: a ring whose slots are halves of tiles, so that scores start, and a next tile is copied, half by half:
            half h of tile i is half number 2 * i + h of the ring.
        rope: rotary keys, a slot for each tile; they come with its second half.
        query: the halves of the rows, and their rotary part. The first and the last lie in the last slots of `latents`
            and `rope` until they have been read.
        query_full: a barrier: the query has come.
        query_read: a barrier: the parts in the rings have been read.
        raw: for each half a barrier for latents that are zeroed in part before their slot counts as full.
        weights: a ring of one slot: weights of a step.
        factors: factors of the accumulated rows, which apply before the weights of the same slot are added.
        grown: not 0 where any of these factors is not 1.
    """

    latents: Any
    rope: Any
    query: Any
    query_full: Any
    query_read: Any
    raw: Any
    weights: Any
    factors: Any
    grown: Any


class Source(NamedTuple):
    """Where rows are copied from.

    Attributes:
        query, query_rope: rows (token, head), as seen for halves and for rotary parts.
        latent_cache, latent_rope: rows of the cache, likewise.
        table: the sequence's blocks.
    """

    query: Any
    query_rope: Any
    latent_cache: Any
    latent_rope: Any
    table: Any
