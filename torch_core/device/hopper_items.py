"""The warp of the Hopper prefill kernel that finds the program's work, items ahead of the warps that do it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_core.device.hopper_work import work_item

__all__ = ["ITEMS", "find_items", "item_count", "read_item"]

#: Work items that are found ahead. A power of two.
ITEMS = gl.constexpr(4)


@gluon.jit
def find_items(
    items, item_full, item_empty, seq_lens, query_start_loc, key_start_loc, num_seqs, table_tokens, num_items,
    NUM_HEADS: gl.constexpr, HEADS_TOGETHER: gl.constexpr, PACK: gl.constexpr, MIN_QUERY: gl.constexpr,
    WARPGROUPS: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """One warp: writes where the tile of each work item stands into a ring that the other warps read.

    To find a tile takes about as long as to work through one step of keys; with short queries that is much.
    """
    TOKENS: gl.constexpr = 64 * WARPGROUPS // PACK
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields = gl.arange(0, 8, layout=layout)
    for turn in range(item_count(num_items)):
        _, seq, token, head = work_item(
            turn, query_start_loc, seq_lens, key_start_loc, num_seqs, num_items, NUM_HEADS // PACK, HEADS_TOGETHER,
            TOKENS, MIN_QUERY, PAGED, PACK > 1,
        )  # fmt: skip
        start = gl.load(query_start_loc + seq)
        query_len = gl.load(query_start_loc + seq + 1) - start
        if PAGED:
            first_key = 0
            seq_len = gl.load(seq_lens + seq)
            num_keys = gl.minimum(seq_len, table_tokens)
        else:
            first_key = gl.load(key_start_loc + seq)
            seq_len = gl.load(key_start_loc + seq + 1) - first_key
            num_keys = seq_len
        values = gl.where(fields == 0, start + token, gl.minimum(query_len - token, TOKENS))
        values = gl.where(fields == 2, seq_len - query_len + token, values)
        values = gl.where(fields == 3, num_keys, gl.where(fields == 4, head * PACK, values))
        values = gl.where(fields == 5, seq, gl.where(fields == 6, first_key, values))
        slot = turn % ITEMS
        mbarrier.wait(item_empty.index(slot), ((turn // ITEMS) & 1) ^ 1)
        items.index(slot).store(values)
        mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def item_count(num_items):
    """Work items of this program: programs take turns, every other turn in reverse order."""
    programs = gl.num_programs(0)
    whole = num_items // programs
    place = gl.where(whole % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return whole + (place < num_items % programs).to(gl.int32)


@gluon.jit
def read_item(items, item_full, item_empty, turn):
    """Waits for the work item of a turn.

    Returns:
        (first query row, query tokens, position of the first, keys, first head, sequence, row of the first key).
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    fields = gl.arange(0, 8, layout=layout)
    slot = turn % ITEMS
    mbarrier.wait(item_full.index(slot), (turn // ITEMS) & 1)
    told = items.index(slot).load(layout)
    mbarrier.arrive(item_empty.index(slot), count=1)
    first_row = gl.sum(gl.where(fields == 0, told, 0), 0)
    tokens = gl.sum(gl.where(fields == 1, told, 0), 0)
    first_pos = gl.sum(gl.where(fields == 2, told, 0), 0)
    num_keys = gl.sum(gl.where(fields == 3, told, 0), 0)
    head = gl.sum(gl.where(fields == 4, told, 0), 0)
    seq = gl.sum(gl.where(fields == 5, told, 0), 0)
    first_key = gl.sum(gl.where(fields == 6, told, 0), 0)
    return first_row, tokens, first_pos, num_keys, head, seq, first_key
