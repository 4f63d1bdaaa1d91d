"""Shared memory of the kernel for few rows, and its loads: tiles by the copy engine, the query as e4m3 terms."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.gluon_names import async_gather, async_load
from torch_core.device.hopper_latents import BLOCK_N, PACKED_BYTES, ROPE, ROPE_OFFSET, SCALE_OFFSET

#: Rows (query token, head) of a program.
COLUMNS = gl.constexpr(16)
#: Elements of a latent that are copied and converted together, and the number of these groups.
GROUP = gl.constexpr(128)
GROUPS = gl.constexpr(4)
#: Eight threads copy 128 bytes of a gathered row side by side.
GATHERED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))


class Room(NamedTuple):
    """Shared memory."""

    codes: Any  # Groups of tiles as the cache holds them: group g of a slot is number `GROUPS * slot + g`.
    ropes: Any  # Rotary keys, a slot for each tile.
    query: Any  # Groups of the query as sums of e4m3 terms, the terms one behind the other, all rows of each.
    query_rope: Any  # The rotary part of the query, like `query`; for packed rows in bfloat16.
    weights: Any  # Weights of a tile, for each warpgroup; for packed rows those of each group.
    states: Any  # Maxima and sums of the second warpgroup; the unit of each row's scores.
    full: Any  # Barriers: the tile of a slot has come.
    ready: Any  # A barrier: the query is there.
    other: Any  # A barrier: the second warpgroup's results are there for the first.


class Source(NamedTuple):
    """The sources of copies."""

    query: Any  # The query.
    # latent_cache, latent_rope: rows of the cache, as seen for groups and for rotary keys; a pointer where rows are
    # gathered.
    latent_cache: Any
    latent_rope: Any
    packed: Any  # The cache's bytes where its rows are packed, else None.
    table: Any  # The sequence's blocks.


@gluon.jit
def load_tile(slot, boxes, source, room, SHAPE: gl.constexpr):
    """Starts the copies of a tile, which lies at `boxes`."""
    if SHAPE.BOX == 0:
        _gather(slot, boxes, source, room, SHAPE)
    else:
        _copy(slot, boxes, source, room, SHAPE)


@gluon.jit
def _gather(slot, rows, source, room, SHAPE: gl.constexpr):
    # Packed rows: a rotary key has as many bytes as a group.
    starts = source.latent_cache + rows.to(gl.int64) * SHAPE.BLOCK_ROWS
    inside = (rows >= 0)[:, None]
    columns = gl.arange(0, GROUP, layout=gl.SliceLayout(0, GATHERED))
    for j in gl.static_range(GROUPS):
        pointers = starts[:, None] + (j * GROUP + columns)[None, :]
        async_gather(room.codes.index(GROUPS * slot + j), pointers, mask=inside)
    pointers = starts[:, None] + (ROPE_OFFSET + columns)[None, :]
    async_gather(room.ropes.index(slot), pointers, mask=inside)
    async_copy.mbarrier_arrive(room.full.index(slot), increment_count=False)


@gluon.jit
def _copy(slot, boxes, source, room, SHAPE: gl.constexpr):
    BOX: gl.constexpr = SHAPE.BOX
    ROPE_COLUMN: gl.constexpr = GROUPS * GROUP if source.packed is None else ROPE_OFFSET
    lanes = gl.arange(0, 32, layout=boxes.type.layout)
    full = room.full.index(slot)
    mbarrier.expect(full, (GROUPS * GROUP + room.ropes.shape[2]) * BLOCK_N)
    for i in gl.static_range(BLOCK_N // BOX):
        row = gl.sum(gl.where(lanes == i, boxes, 0), 0)
        for j in gl.static_range(GROUPS):
            codes = room.codes.index(GROUPS * slot + j).slice(i * BOX, BOX)
            async_load(source.latent_cache, [row, j * GROUP], full, codes)
        async_load(source.latent_rope, [row, ROPE_COLUMN], full, room.ropes.index(slot).slice(i * BOX, BOX))


@gluon.jit
def zero_behind(slot, live, room):
    """Zeros the groups of a tile from row `live` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)) < live
    for i in range(GROUPS):
        tile = room.codes.index(GROUPS * slot + i)
        part = tile.load(layout).to(gl.int8, bitcast=True)
        part = gl.where(inside[:, None], part, gl.zeros([BLOCK_N, GROUP], gl.int8, layout))
        tile.store(part.to(tile.dtype, bitcast=True))


@gluon.jit
def load_scales(work, source, step, layout: gl.constexpr, SHAPE: gl.constexpr):
    """The scales of the groups of packed rows, a tuple of four; 0 where there is no token."""
    key = work.start + step * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    inside = key < work.end
    block = gl.load(source.table + key // SHAPE.BLOCK_SIZE, mask=inside, other=0)
    # A gathered row is a block, and BLOCK_ROWS its elements.
    BLOCK_ROWS: gl.constexpr = 1 if SHAPE.BOX == 0 else SHAPE.BLOCK_ROWS
    row = (block * BLOCK_ROWS + key % SHAPE.BLOCK_SIZE).to(gl.int64) * PACKED_BYTES + SCALE_OFFSET
    scale = (source.packed + row).to(gl.pointer_type(gl.float32), bitcast=True)
    scales = ()
    for i in gl.static_range(GROUPS):
        scales = scales + (gl.load(scale + i, mask=inside, other=0.0),)  # noqa: RUF005 - no starred tuples here
    return scales


@gluon.jit
def load_query(work, source, room, STRIDES: gl.constexpr, SHAPE: gl.constexpr):
    """Stores the rows of the query in shared memory as terms, and the units of their scores."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    pointers, live = _pointers(work, source, layout, GROUP, STRIDES, SHAPE)
    rope_pointers, rope_live = _pointers(work, source, narrow, ROPE, STRIDES, SHAPE)
    found = gl.load(rope_pointers + GROUPS * GROUP, mask=rope_live, other=0.0).to(gl.float32)
    peak = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(1, layout))
    for i in gl.static_range(GROUPS):
        part = gl.load(pointers + i * GROUP, mask=live, other=0.0).to(gl.float32)
        peak = gl.maximum(peak, gl.max(gl.maximum(part, -part), 1))
    if source.packed is None:
        rope_peak = gl.max(gl.maximum(found, -found), 1)
        peak = gl.maximum(peak, gl.convert_layout(rope_peak, gl.SliceLayout(1, layout)))
    # A power of two that takes the largest element to where two terms hold eight bits of it and of elements 2^-9 as
    # large: e4m3 ends at 448, and its steps at 2^-9.
    factor = gl.where(peak > 0.0, gl.exp2(7.0 - gl.floor(gl.log2(peak))), 1.0)
    if source.packed is None:
        found = found * gl.convert_layout(factor, gl.SliceLayout(1, narrow))[:, None]
    _store_terms(found, room.query_rope)
    for i in gl.static_range(GROUPS):
        part = gl.load(pointers + i * GROUP, mask=live, other=0.0).to(gl.float32)
        _store_terms(part * factor[:, None], room.query.index(i))
    room.states.index(2).store(1.0 / factor)


@gluon.jit
def _pointers(work, source, layout: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, SHAPE: gl.constexpr):
    rows = work.first_row + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    tokens = rows // SHAPE.NUM_HEADS
    element = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    offsets = (work.query_start + tokens).to(gl.int64) * STRIDES[0] + rows % SHAPE.NUM_HEADS * STRIDES[1]
    live = (tokens < work.query_len)[:, None] & (element >= 0)[None, :]
    return source.query + offsets[:, None] + element[None, :], live


@gluon.jit
def _store_terms(rest, room):
    """Stores rows as the sum of terms of the room's dtype: each is the rest of the terms before it."""
    for i in gl.static_range(room.shape[0] // COLUMNS):
        term = rest.to(room.dtype)
        room.slice(i * COLUMNS, COLUMNS).store(term)
        rest = rest - term.to(gl.float32)
