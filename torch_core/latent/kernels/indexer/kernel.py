"""The kernels of an indexer: scores of one query and a tile of cached keys at a time, and the slots of chosen keys."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.store import as_multiplied
from torch_core.device.tiles import key_rows, load_tile, page_ids


@triton.jit
def indexer_logits_kernel(
    query,
    weights,
    key_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    k_scale,
    logits,
    num_seqs,
    table_stride,
    table_tokens,
    scale,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
):
    """Grid: (tokens, tiles of BLOCK_N keys). The heads of a query are the columns of one product with the keys."""
    token = tl.program_id(0)
    position = tl.program_id(1) * BLOCK_N
    columns = tl.arange(0, BLOCK_N)
    seq = 0
    for base in range(0, num_seqs, BLOCK_SEQS):
        seqs = base + tl.arange(0, BLOCK_SEQS)
        ends = tl.load(query_start_loc + 1 + seqs, mask=seqs < num_seqs, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    # How many keys the query sees: none for a row of padding.
    last = 0
    if seq < num_seqs:
        last = tl.load(seq_lens + seq) - tl.load(query_start_loc + seq + 1) + token + 1
        last = tl.minimum(last, table_tokens)
    row = logits + token.to(tl.int64) * table_tokens + position
    inside = position + columns < last
    result = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if position < last:
        heads = tl.arange(0, HEADS_PADDED)
        dims = tl.arange(0, HEAD_PADDED)
        live = heads < NUM_HEADS
        rows = query + token.to(tl.int64) * QUERY_STRIDES[0] + heads * QUERY_STRIDES[1]
        q = tl.load(rows[:, None] + dims[None, :], mask=live[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0)
        q = as_multiplied(q, key_cache)
        weight = tl.load(weights + token.to(tl.int64) * WEIGHT_STRIDES[0] + heads, mask=live, other=0.0)
        table = block_tables + seq.to(tl.int64) * table_stride
        pages = page_ids(table, position + columns, None, last, BLOCK_SIZE)
        pointers = key_rows(key_cache, pages, position, columns, KEY_STRIDES, BLOCK_SIZE, True)
        keys = load_tile(pointers, inside, HEAD_SIZE, HEAD_PADDED, True).to(q.dtype)
        if k_scale is not None:
            scale *= tl.load(k_scale)
        scores = tl.dot(keys, tl.trans(q), input_precision="ieee") * scale
        # Columns that pad the heads are weighed with 0.
        total = tl.sum(tl.maximum(scores, 0.0) * weight[None, :], 1)
        result = tl.where(inside, total, float("-inf"))
    tl.store(row + columns, result, mask=position + columns < table_tokens)


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
