"""The warp of the Hopper prefill kernel that finds the program's work, items ahead of the warps that do it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.hopper_work import chunk_of_tile, work_item

#: Work items that are found ahead. A power of two.
ITEMS = gl.constexpr(4)


@gluon.jit
def find_items(call, rings, SHAPE: gl.constexpr):
    """One warp: writes where the tile of each work item stands into the ring that the other warps read.

    To find a tile takes about as long as to work through one step of keys; with short queries that is much.
    """
    items = rings.items
    batch = call.batch
    TOKENS: gl.constexpr = 64 * SHAPE.WARPGROUPS // SHAPE.PACK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    for turn in range(item_count(call.num_items)):
        _, seq, tile, head = work_item(turn, call, SHAPE)
        start = gl.load(batch.query_start_loc + seq)
        query_len = gl.load(batch.query_start_loc + seq + 1) - start
        if SHAPE.PAGED:
            first_key = 0
            seq_len = gl.load(batch.seq_lens + seq)
            num_keys = gl.minimum(seq_len, batch.table_tokens)
        else:
            first_key = gl.load(batch.key_start_loc + seq)
            seq_len = gl.load(batch.key_start_loc + seq + 1) - first_key
            num_keys = seq_len
        if call.split is not None:
            tile, first_key, num_keys, row = chunk_of_tile(seq, tile, query_len, seq_len, num_keys, call, TOKENS)
        token = tile * TOKENS
        values = gl.where(fields == 0, start + token, gl.minimum(query_len - token, TOKENS))
        values = gl.where(fields == 2, seq_len - query_len + token, values)
        values = gl.where(fields == 3, num_keys, gl.where(fields == 4, head * SHAPE.PACK, values))
        values = gl.where(fields == 5, seq, gl.where(fields == 6, first_key, values))
        if call.split is not None:
            values = gl.where(fields == 7, row, values)
        slot = turn % ITEMS
        mbarrier.wait(items.empty.index(slot), ((turn // ITEMS) & 1) ^ 1)
        items.tiles.index(slot).store(values)
        mbarrier.arrive(items.full.index(slot), count=1)


@gluon.jit
def item_count(num_items):
    """Work items of this program: programs take turns, every other turn in reverse order."""
    programs = gl.num_programs(0)
    whole = num_items // programs
    place = gl.where(whole % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return whole + (place < num_items % programs).to(gl.int32)


@gluon.jit
def read_item(items, turn):
    """Waits for the work item of a turn in the ring `items`, and returns its words.

    They are (first query row, query tokens, position of the first, keys, first head, sequence, first key, partial row).
    The first key is a row of dense keys, or the start of a chunk; keys end where the chunk does; the partial row is
    that of the first query row and this chunk.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    slot = turn % ITEMS
    mbarrier.wait(items.full.index(slot), (turn // ITEMS) & 1)
    told = items.tiles.index(slot).load(layout)
    mbarrier.arrive(items.empty.index(slot), count=1)
    return words_of(told)


@gluon.jit
def words_of(told):
    """The eight words that every thread has, one by one."""
    fields = gl.arange(0, 8, layout=told.type.layout)
    words = ()
    for i in gl.static_range(8):
        words = words + (gl.sum(gl.where(fields == i, told, 0), 0),)  # noqa: RUF005 - no starred tuples here
    return words
