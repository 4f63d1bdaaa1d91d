"""What the warpgroups of the kernel for few rows share: sizes, shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from torch_core.attention.mla_hopper.work import Results

__all__ = ["BLOCK_N", "CHUNKS", "COLUMNS", "PART", "Results", "Room", "Source"]

#: Rows (query token, head) of a program, and tokens of one step.
COLUMNS = gl.constexpr(16)
BLOCK_N = gl.constexpr(64)
#: Elements of a row that are copied and converted together, and how many such parts a row has.
PART = gl.constexpr(64)
CHUNKS = gl.constexpr(9)


class Room(NamedTuple):
    """Shared memory; of most things each warpgroup has its own.

    Attributes:
        codes: the parts of a tile as the cache holds them.
        latents: those of a tile as they are multiplied.
        query: the rows of the query, part by part.
        weights: of a tile.
        states: maxima and sums of the second warpgroup; what scores of each row are worth.
        full: barriers: a tile's codes have come.
        other: a barrier: what the second warpgroup leaves for the first is there.
    """

    codes: Any
    latents: Any
    query: Any
    weights: Any
    states: Any
    full: Any
    other: Any


class Source(NamedTuple):
    """Where latents are copied from: the cache as rows, also as bytes where they are packed; the sequence's blocks."""

    latent_cache: Any
    packed: Any
    table: Any
