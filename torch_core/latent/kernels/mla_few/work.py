"""Sizes and shared memory of the latent kernel for few rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

__all__ = ["COLUMNS", "GROUP", "GROUPS", "Room", "Source"]

#: Rows (query token, head) of a program.
COLUMNS = gl.constexpr(16)
#: Elements of a latent that are copied and converted together, and the number of these groups.
GROUP = gl.constexpr(128)
GROUPS = gl.constexpr(4)


class Room(NamedTuple):
    """Shared memory.

    Attributes:
        codes: groups of tiles as the cache holds them: group g of a slot is number `GROUPS * slot + g`.
        ropes: rotary keys, a slot for each tile.
        query: groups of the query as sums of e4m3 terms, the terms one behind the other, all rows of each.
        query_rope: its rotary part: like `query`, for packed rows in bfloat16.
        weights: of a tile, for each warpgroup; for packed rows those of each group.
        states: maxima and sums of the second warpgroup; the unit of each row's scores.
        full: barriers: the tile of a slot has come.
        ready: a barrier: the query is there.
        other: a barrier: the second warpgroup's results are there for the first.
    """

    codes: Any
    ropes: Any
    query: Any
    query_rope: Any
    weights: Any
    states: Any
    full: Any
    ready: Any
    other: Any


class Source(NamedTuple):
    """Where rows are copied from.

    Attributes:
        query: the query.
        latent_cache, latent_rope: rows of the cache, as seen for groups and for rotary keys.
        packed: the cache's bytes where its rows are packed, else None.
        table: the sequence's blocks.
    """

    query: Any
    latent_cache: Any
    latent_rope: Any
    packed: Any
    table: Any
