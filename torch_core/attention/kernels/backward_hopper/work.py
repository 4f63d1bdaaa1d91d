"""Sizes, rings and work of the Hopper backward kernel, for all of its warps."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.hopper_work import level_by_level

_SEQS = gl.constexpr(32)


class Sizes(NamedTuple):
    """Sizes and strides of a call, known when compiling; rows and columns are those that the copy engine sees."""

    NUM_KV_HEADS: Any  # Key/value heads.
    GROUP: Any  # Query heads of each key/value head.
    HEADS_TOGETHER: Any  # Key/value heads whose programs alternate.
    HEAD_SIZE: Any  # Elements of a head of queries and keys.
    VALUE_SIZE: Any  # Elements of a head of values.
    REST_SIZE: Any  # Elements of a head of queries and keys that lie in tiles of their own, the last ones.
    BLOCK_M: Any  # Queries of a tile.
    BLOCK_N: Any  # Keys of a program.
    ROLE_KEYS: Any  # Keys of a role that works out their gradients.
    PART_WIDTH: Any  # Columns of the queries' gradients that one product makes.
    ADDERS: Any  # Warpgroups that add to the queries' gradients.
    IN_ORDER: Any  # Tiles of keys add to the queries' gradients in order.
    RISES: Any  # The later half of the tiles of keys takes the first queries first.
    LEFT: Any  # Queries see keys of a window to the left.
    QUERY_STRIDE: Any  # QUERY_STRIDE, D_OUT_STRIDE, KEY_STRIDE, VALUE_STRIDE: columns from one head to the next.
    D_OUT_STRIDE: Any
    KEY_STRIDE: Any
    VALUE_STRIDE: Any
    D_KEY_STRIDES: Any  # D_..._STRIDES: elements from one token, and from one head, to the next.
    D_VALUE_STRIDES: Any
    D_QUERY_STRIDES: Any


class Tensors(NamedTuple):
    """The arrays that the copy engine reads: operands, and log-sum-exp and delta of the queries tile by tile."""

    query: Any
    key: Any
    value: Any
    d_out: Any
    row_stats: Any


class Gradients(NamedTuple):
    """The destinations of gradients."""

    query_sums: Any  # Float32 sums of the queries' gradients, tile by tile.
    turns: Any  # Number of tiles of keys that have added to each of them.
    key: Any  # key, value, query: the gradients.
    value: Any
    query: Any
    scale: Any  # Factor of the scores.
    query_tiles: Any  # Tiles of queries of a head, padding included.


class Rings(NamedTuple):
    """The shared memory of a program: rings of tiles, score gradients, statistics of the rows of query tiles."""

    key: Any  # key, value, query, d_out: tiles that the copy engine brings.
    value: Any
    query: Any
    d_out: Any
    d_scores: Any  # Two tiles, keys by rows.
    weights: Any  # Pairs of weights, where one warpgroup makes them for another; a tile for each slot of queries.
    key_rest: Any  # key_rest, query_rest: of the same slots, the last REST_SIZE elements of a head, or None.
    query_rest: Any
    stats: Any  # Log-sum-exp and delta of the tile of queries in each slot.
    raw: Any  # A barrier for tiles that are zeroed in part before their slot counts as full.


class Item(NamedTuple):
    """The tile of keys of a program, and the query tiles that see it."""

    live: Any  # The program has a tile.
    spare: Any  # Without a tile, the number of this program among those of its head.
    spares: Any  # Programs of the head without a tile.
    kv_head: Any  # The head of the tile.
    tile: Any  # Number of the tile in its sequence.
    first_key: Any  # Row of the tile's first key.
    keys: Any  # Keys of the sequence from there on.
    first_query: Any  # Row of the sequence's first query.
    queries: Any  # Queries of the sequence.
    first_tile: Any  # The sequence's first tile among the padded tiles of queries.
    start: Any  # start, end: tiles of queries, counted from the sequence's first query, that any key of the tile sees.
    end: Any
    first: Any  # The first query that sees the tile's first key.
    last: Any  # The last of them; those of the next key are one later.
    rises: Any  # The program takes the first queries first.
    lowest: Any  # The first key that the sequence's first query sees, at or below 0 without a window.


@gluon.jit
def find_item(query_start_loc, key_start_loc, num_seqs, window_left, window_right, SHAPE: gl.constexpr):
    """The work of this program: a few heads at a time, so that their sums stay in the L2 cache.

    Programs of a head wait for one another to add to the queries' gradient: the more heads alternate, the fewer. Among
    the tiles of a head those with the most queries under a causal mask come first, and of a sequence the first.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, _SEQS, layout=layout)
    TOGETHER: gl.constexpr = SHAPE.HEADS_TOGETHER
    share = gl.num_programs(0) // SHAPE.NUM_KV_HEADS
    kv_head = gl.program_id(0) // (share * TOGETHER) * TOGETHER + gl.program_id(0) % TOGETHER
    rank = gl.program_id(0) % (share * TOGETHER) // TOGETHER
    total = 0
    chunk = 0
    before = 0
    for base in range(0, num_seqs, _SEQS):
        lengths = _lengths(key_start_loc, base + lanes, num_seqs)
        chunk = gl.where(total <= rank, base, chunk)
        before = gl.where(total <= rank, total, before)
        total += gl.sum((lengths + BLOCK_N - 1) // BLOCK_N, 0)
    lengths = _lengths(key_start_loc, chunk + lanes, num_seqs)
    lane, from_end = level_by_level(rank - before, (lengths + BLOCK_N - 1) // BLOCK_N, lengths, lanes, BLOCK_N)
    seq = gl.minimum(chunk + lane, num_seqs - 1)
    first_key = gl.load(key_start_loc + seq)
    keys = gl.load(key_start_loc + seq + 1) - first_key
    first_query = gl.load(query_start_loc + seq)
    queries = gl.load(query_start_loc + seq + 1) - first_query
    tile = (keys + BLOCK_N - 1) // BLOCK_N - 1 - from_end
    position = tile * BLOCK_N
    context = keys - queries
    start = 0
    end = (queries + BLOCK_M - 1) // BLOCK_M
    first = -(2**30)
    last = 2**30
    lowest = -(2**30)
    if window_right is not None:
        first = position - window_right - context
        start = gl.maximum(first, 0) // BLOCK_M
    if window_left is not None:
        last = position + window_left - context
        lowest = context - window_left
        end = gl.minimum(end, gl.maximum(last + BLOCK_N - 1 + BLOCK_M, 0) // BLOCK_M)
    rises = (tile > from_end) if SHAPE.RISES else False
    return Item(
        rank < total, rank - total, share - total, kv_head, tile, first_key + position, keys - position, first_query,
        queries, first_query // BLOCK_M + seq, start, gl.maximum(end, start), first, last, rises, lowest,
    )  # fmt: skip


@gluon.jit
def query_tile(item, step, SHAPE: gl.constexpr):
    """The tile of queries of a step: of all heads of the group, one after the other."""
    tile = item.end - 1 - step // SHAPE.GROUP
    if SHAPE.RISES:
        tile = gl.where(item.rises, item.start + step // SHAPE.GROUP, tile)
    return tile


@gluon.jit
def full_tiles(item, START: gl.constexpr, KEYS: gl.constexpr, SHAPE: gl.constexpr):
    """The tiles of queries [low, high) that see all of KEYS keys from START on, which are all there.

    Those from `high` on no longer see all of them, those before `low` not yet; a tile that reaches out of its sequence
    has none, so that the mask also hides keys that the sequence does not own. Nor has a sequence's last tile: so later
    keys add to the gradient of queries in [low, high).
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    high = item.end
    if SHAPE.LEFT:
        high = gl.minimum(gl.maximum(item.last + START + 1, item.start * BLOCK_M) // BLOCK_M, high)
    low = high
    if item.keys > SHAPE.BLOCK_N:
        low = gl.minimum(gl.maximum((item.first + START + KEYS - 1 + BLOCK_M - 1) // BLOCK_M, item.start), high)
    return low, high


@gluon.jit
def store_rows(sums, out, item, STRIDE: gl.constexpr):
    """Stores the sums of a tile of keys as the matrix units leave them, where no tile is free to pass through."""
    layout: gl.constexpr = sums.type.layout
    rows = gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    pointers = (out + (item.first_key + rows).to(gl.int64) * STRIDE)[:, None] + columns[None, :]
    gl.store(pointers, sums.to(out.dtype.element_ty), mask=(rows < item.keys)[:, None])


@gluon.jit
def zero_padding(item, gradients, key_start_loc, num_keys, num_seqs, SHAPE: gl.constexpr):
    """Programs without a tile, one for each head at least: zeros the gradients of rows past the last sequence."""
    start = gl.load(key_start_loc + num_seqs)
    for base in range(start + item.spare * 32, num_keys, item.spares * 32):
        _zero_rows(gradients.key, base, num_keys, item.kv_head, SHAPE.D_KEY_STRIDES, SHAPE.HEAD_SIZE)
        _zero_rows(gradients.value, base, num_keys, item.kv_head, SHAPE.D_VALUE_STRIDES, SHAPE.VALUE_SIZE)


@gluon.jit
def _zero_rows(out, base, end, kv_head, STRIDES: gl.constexpr, WIDTH: gl.constexpr):
    PART: gl.constexpr = WIDTH & -WIDTH
    LANES: gl.constexpr = PART // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([32, PART], gl.float32, layout).to(out.dtype.element_ty)
    rows = base + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    live = (rows < end)[:, None]
    places = rows.to(gl.int64) * STRIDES[0] + kv_head * STRIDES[1]
    for part in gl.static_range(0, WIDTH, PART):
        gl.store(out + places[:, None] + (part + columns)[None, :], zeros, mask=live)


@gluon.jit
def _lengths(start_loc, seqs, num_seqs):
    live = seqs < num_seqs
    return gl.load(start_loc + seqs + 1, mask=live, other=0) - gl.load(start_loc + seqs, mask=live, other=0)
