"""The work of a program of the Hopper prefill kernels: the next tile and head, and the copies of its keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_tiles import load_box
from torch_core.device.work import chunk_span

_SEQS = gl.constexpr(32)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles(base, batch, bounds, split, SHAPE: gl.constexpr):
    TILE: gl.constexpr = 64 * SHAPE.WARPGROUPS // SHAPE.PACK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    seqs = base + gl.arange(0, _SEQS, layout=layout)
    live = seqs < batch.num_seqs
    query_end = gl.load(batch.query_start_loc + seqs + 1, mask=live, other=0)
    query_len = query_end - gl.load(batch.query_start_loc + seqs, mask=live, other=0)
    tiles = gl.where(query_len >= SHAPE.MIN_QUERY, (query_len + TILE - 1) // TILE, 0)
    if split is not None:
        seq_len = gl.load(batch.seq_lens + seqs, mask=live, other=0)
        _, chunks = chunk_span(seq_len, query_len, batch.table_tokens, bounds, split.chunk, split.max_query)
        tiles *= chunks
    return tiles, live


@gluon.jit
def count_items(batch, bounds, split, SHAPE: gl.constexpr):
    """The work items of the batch: tiles of the sequences that are served, times heads, times chunks of split keys."""
    total = 0
    for base in range(0, batch.num_seqs, _SEQS):
        tiles, _ = _tiles(base, batch, bounds, split, SHAPE)
        total += gl.sum(tiles, 0)
    return total * (SHAPE.NUM_HEADS // SHAPE.PACK)


@gluon.jit
def work_item(turn, call, SHAPE: gl.constexpr):
    """The work of this program in its `turn`-th turn.

    Work items are tiles times heads. Among 32 sequences side by side, those with the most keys under a causal mask
    come first, all heads of a tile together. Programs take items in turns, every other turn in reverse order: so each
    of them gets about the same number of keys in all (longest processing time first), and all of them are at about
    the same keys at a time, which stay in the L2 cache. With PACK, or with keys in chunks, the tiles of a sequence
    follow each other: they are about equal, and can share their keys.

    Returns (item number, sequence, tile of the sequence, head in units of PACK); the last three mean nothing beyond the
    last item. Where keys are split, chunk `i` of tile `t` is tile number t * chunks + i.
    """
    batch = call.batch
    TILE: gl.constexpr = 64 * SHAPE.WARPGROUPS // SHAPE.PACK
    PARTS: gl.constexpr = SHAPE.NUM_HEADS // SHAPE.PACK // SHAPE.HEADS_TOGETHER
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lanes = gl.arange(0, _SEQS, layout=layout)
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    place = gl.where(turn % 2 == 0, place, programs - 1 - place)
    item = turn * programs + place
    share = call.num_items // PARTS
    part = item // share
    within = item % share
    within = gl.where((PARTS - part) % 2 == 1, within, share - 1 - within)
    wanted = within // SHAPE.HEADS_TOGETHER
    head = part * SHAPE.HEADS_TOGETHER + within % SHAPE.HEADS_TOGETHER

    chunk = 0
    before = 0
    if batch.num_seqs > _SEQS:
        total = 0
        for base in range(0, batch.num_seqs, _SEQS):
            tiles, _ = _tiles(base, batch, call.bounds, call.split, SHAPE)
            chunk = gl.where(total <= wanted, base, chunk)
            before = gl.where(total <= wanted, total, before)
            total += gl.sum(tiles, 0)
    rank = wanted - before

    tiles, live = _tiles(chunk, batch, call.bounds, call.split, SHAPE)
    if SHAPE.PAGED:
        keys = gl.load(batch.seq_lens + chunk + lanes, mask=live, other=0)
    else:
        keys = gl.load(batch.key_start_loc + chunk + lanes + 1, mask=live, other=0)
        keys -= gl.load(batch.key_start_loc + chunk + lanes, mask=live, other=0)
    if SHAPE.PACK > 1 or call.split is not None:
        lane, tile = _sequence_by_sequence(rank, tiles, keys, lanes, TILE)
    else:
        lane, tile = level_by_level(rank, tiles, keys, lanes, TILE)
    return item, chunk + lane, tile, head


@gluon.jit
def chunk_of_tile(seq, tile, query_len, seq_len, num_keys, call, TOKENS: gl.constexpr):
    """A tile number of `work_item` if keys are split: (tile, first key of the chunk, end, row of the scratch)."""
    split = call.split
    first, chunks = chunk_span(seq_len, query_len, call.batch.table_tokens, call.bounds, split.chunk, split.max_query)
    index = tile % chunks
    tile = tile // chunks
    first_key = (first + index) * split.chunk
    row = (seq * split.max_query + tile * TOKENS) * split.max_chunks + index
    return tile, first_key, gl.minimum(num_keys, first_key + split.chunk), row


@gluon.jit
def level_by_level(rank, tiles, keys, lanes, TILE: gl.constexpr):
    # (lane, tile of its sequence) of the tile number `rank`: the tiles with the most keys first.
    # The last tile of a sequence has level `top`, the one before it the next level, and so on.
    key_tiles = gl.where(tiles > 0, (keys + TILE - 1) // TILE, 0)
    top = gl.max(key_tiles, 0) - key_tiles
    level = 0
    beyond = gl.max(gl.where(tiles > 0, top + tiles, 0), 0)
    while beyond - level > 1:
        middle = (level + beyond) // 2
        fits = gl.sum(gl.minimum(tiles, gl.maximum(middle - top, 0)), 0) <= rank
        level = gl.where(fits, middle, level)
        beyond = gl.where(fits, beyond, middle)
    rank -= gl.sum(gl.minimum(tiles, gl.maximum(level - top, 0)), 0)
    has = ((level >= top) & (level < top + tiles)).to(gl.int32)
    here = (has > 0) & (gl.associative_scan(has, 0, _add) == rank + 1)
    return gl.sum(gl.where(here, lanes, 0), 0), gl.sum(gl.where(here, top + tiles - 1 - level, 0), 0)


@gluon.jit
def _sequence_by_sequence(rank, tiles, keys, lanes, TILE: gl.constexpr):
    # The same: the sequences with the most keys first, and of each its last tile first.
    length = keys // TILE
    # Sequences of at least `shortest` hold the tile, those of at least `beyond` do not.
    shortest = 0
    beyond = gl.max(length, 0) + 1
    while beyond - shortest > 1:
        middle = (shortest + beyond) // 2
        holds = gl.sum(gl.where(length >= middle, tiles, 0), 0) > rank
        shortest = gl.where(holds, middle, shortest)
        beyond = gl.where(holds, beyond, middle)
    rank -= gl.sum(gl.where(length > shortest, tiles, 0), 0)
    alike = gl.where(length == shortest, tiles, 0)
    end = gl.associative_scan(alike, 0, _add)
    here = (rank >= end - alike) & (rank < end)
    return gl.sum(gl.where(here, lanes, 0), 0), gl.sum(gl.where(here, end - 1 - rank, 0), 0)


@gluon.jit
def key_tiles(low, high, SHAPE: gl.constexpr):
    """(First tile, end) of the tiles that hold the keys [low, high), counted from key 0; one tile at least."""
    first = low // SHAPE.BLOCK_N
    return first, gl.maximum((high + SHAPE.BLOCK_N - 1) // SHAPE.BLOCK_N, first + 1)


@gluon.jit
def tile_blocks(table, position, low, high, base, SHAPE: gl.constexpr):
    """The table entries for `tile_rows` and the tile of keys at `position`: an id for each lane's box, as loaded.

    Boxes without a key in [low, high) have -1, and the table is not read there. Nothing is worked out from the ids:
    that would wait for them. Without a table, the rows of `tile_rows` themselves, from the row `base`.
    """
    key, inside = _box_keys(position, low, high, SHAPE)
    if SHAPE.PAGED:
        return gl.load(table + key // SHAPE.BLOCK_SIZE, mask=inside, other=-1)
    return gl.where(inside, base + key, -SHAPE.BOX)


@gluon.jit
def tile_rows(blocks, position, base, SHAPE: gl.constexpr):
    """Rows in the array's matrix of the boxes of the tile of keys at `position`: one for each lane of a warp.

    A box without a key gets a row outside the matrix: the copy engine fills it with zeros.
    """
    if SHAPE.PAGED:
        lanes = gl.arange(0, 32, layout=blocks.type.layout)
        row = base + blocks * SHAPE.BLOCK_ROWS + (position + lanes * SHAPE.BOX) % SHAPE.BLOCK_SIZE
        return gl.where(blocks < 0, -SHAPE.BOX, row)
    return blocks


@gluon.jit
def _box_keys(position, low, high, SHAPE: gl.constexpr):
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    key = position + lanes * SHAPE.BOX
    return key, (key < high) & (key + SHAPE.BOX > low) & (lanes < SHAPE.BLOCK_N // SHAPE.BOX)


@gluon.jit
def copy_query(call, first_row, head, rings, slot, SHAPE: gl.constexpr):
    """Starts the copies of the query tile of a work item into a slot of the ring `rings.query`; then it is full."""
    PACK: gl.constexpr = SHAPE.PACK
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WARPGROUPS: gl.constexpr = SHAPE.WARPGROUPS
    BYTES: gl.constexpr = call.query.dtype.primitive_bitwidth // 8
    queries = rings.query
    full = queries.full.index(slot)
    mbarrier.expect(full, 64 * WARPGROUPS * (HEAD_SIZE + SHAPE.REST_SIZE) * BYTES)
    for i in gl.static_range(WARPGROUPS):
        if PACK == 1:
            async_load(
                call.query, [first_row + i * 64, head * SHAPE.QUERY_STRIDE], full,
                queries.tiles.index(slot * WARPGROUPS + i),
            )  # fmt: skip
            if SHAPE.REST_SIZE > 0:
                async_load(
                    call.query_rest, [first_row + i * 64, head * SHAPE.QUERY_STRIDE + HEAD_SIZE], full,
                    rings.query_rest.index(slot * WARPGROUPS + i),
                )  # fmt: skip
        else:
            # Rows of a warpgroup are dense in shared memory: they may come from two axes of the query.
            async_load(
                call.query, [first_row + i * (64 // PACK), head, 0], full,
                queries.tiles.index(slot * WARPGROUPS + i).reshape([64 // PACK, PACK, HEAD_SIZE]),
            )  # fmt: skip


@gluon.jit
def copy_tile(array, rows, column, barrier, tiles, slot, SHAPE: gl.constexpr, rest=None, rest_tiles=None):
    """Starts the copies of a tile's boxes, with the rows of `tile_rows`, into a slot; then `barrier` completes.

    With `rest`, the same array as seen for the last REST_SIZE elements of a head, these go to `rest_tiles`.
    """
    WIDTH: gl.constexpr = SHAPE.HEAD_SIZE if rest is None else SHAPE.HEAD_SIZE + SHAPE.REST_SIZE
    mbarrier.expect(barrier, SHAPE.BLOCK_N * WIDTH * array.dtype.primitive_bitwidth // 8)
    lanes = gl.arange(0, 32, layout=rows.type.layout)
    for i in gl.static_range(SHAPE.BLOCK_N // SHAPE.BOX):
        row = gl.sum(gl.where(lanes == i, rows, 0), 0)
        load_box(array, row, column, barrier, tiles.index(slot), i * SHAPE.BOX, SHAPE.BOX)
        if rest is not None:
            column_rest = column + SHAPE.HEAD_SIZE
            load_box(rest, row, column_rest, barrier, rest_tiles.index(slot), i * SHAPE.BOX, SHAPE.BOX)


@gluon.jit
def zero_outside(tile, low, high, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros the rows of a tile outside [low, high): their weight is 0, but 0 * NaN of unwritten memory is NaN."""
    lanes: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    for i in gl.static_range(ROWS // 8):
        if (i * 8 < low) | (i * 8 + 8 > high):
            part = tile.slice(i * 8, 8)
            rows = i * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
            keep = (rows >= low) & (rows < high)
            values = part.load(layout)
            part.store(gl.where(keep[:, None], values, gl.zeros([8, COLUMNS], values.dtype, layout)))
