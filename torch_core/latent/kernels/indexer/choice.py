"""The kernel that looks up the slots of chosen keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chosen_slots_kernel(
    topk_indices,
    block_tables,
    query_start_loc,
    slots,
    counts,
    starts,
    num_tokens,
    num_seqs,
    topk,
    max_blocks,
    index_stride,
    table_stride,
    BLOCK_SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid: (tokens,). Indices that are no keys are left out, and slot 0 fills the row up.

    So is a position beyond the table: on a device it was not checked before.
    """
    token = tl.program_id(0)
    seq = 0
    for base in range(0, num_seqs, BLOCK_SEQS):
        seqs = base + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(query_start_loc + 1 + seqs, mask=seqs < num_seqs, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    indices = topk_indices + token.to(tl.int64) * index_stride
    table = block_tables + tl.cast(seq, tl.int64) * table_stride
    row = slots + token.to(tl.int64) * topk
    found = 0
    for base in range(0, topk, BLOCK):
        columns = base + tl.arange(0, BLOCK)
        position = tl.load(indices + columns, mask=(columns < topk) & (seq < num_seqs), other=-1)
        live = (position >= 0) & (position // BLOCK_SIZE < max_blocks)
        block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0)
        place = found + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(row + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)
        found += tl.sum(live.to(tl.int32), 0)
    for base in range(0, topk, BLOCK):
        columns = base + tl.arange(0, BLOCK)
        tl.store(row + columns, tl.zeros([BLOCK], tl.int32), mask=(columns >= found) & (columns < topk))
    tl.store(counts + token, found)
    tl.store(starts + token, token)
    if token == num_tokens - 1:
        tl.store(starts + num_tokens, num_tokens)
