"""The kernel before the Hopper backward kernel, which takes tiles of queries.

Tiles of queries are padded: those of sequence `i` start at tile query_start_loc[i] // BLOCK_M + i of each head, and so
do rows of padding, which are one sequence more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import LOG2E


@triton.jit
def prepare_backward_kernel(
    out,
    d_out,
    lse,
    d_lse,
    sinks,
    query_start_loc,
    key_start_loc,
    row_stats,
    turns,
    d_query,
    sink_parts,
    num_tokens,
    num_seqs,
    query_tiles,
    window_right,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    D_OUT_STRIDES: tl.constexpr,
    D_QUERY_STRIDES: tl.constexpr,
):
    """A program for each tile of queries and head: log-sum-exp in units of log 2 and the sums of out * d_out of its
    rows. Rows that see no key get +inf, and so weights of 0; tiles of them get their gradient, zeros, here.
    `sink_parts` [head, tile] are the tiles' shares of the gradients of sinks, which only the log-sum-exp knows of.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first, rows, seq = _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M)
    lanes = tl.arange(0, BLOCK_M)
    live = (lanes < rows) & (seq < num_seqs)
    tokens = (first + lanes).to(tl.int64)
    row_lse = tl.load(lse + tokens * NUM_HEADS + head, mask=live, other=float("-inf"))
    live = live & (row_lse > float("-inf"))
    columns = tl.arange(0, VALUE_SIZE)[None, :]
    outs = out + (tokens * OUT_STRIDES[0] + head * OUT_STRIDES[1])[:, None] + columns
    d_outs = d_out + (tokens * D_OUT_STRIDES[0] + head * D_OUT_STRIDES[1])[:, None] + columns
    products = tl.load(outs, mask=live[:, None], other=0.0).to(tl.float32)
    products *= tl.load(d_outs, mask=live[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(products, 1)
    if d_lse is not None:
        delta -= tl.load(d_lse + tokens * NUM_HEADS + head, mask=live, other=0.0)
    place = (head * query_tiles + tile).to(tl.int64)
    stats = row_stats + place * (2 * BLOCK_M) + lanes
    tl.store(stats, tl.where(live, row_lse * LOG2E, float("inf")))
    tl.store(stats + BLOCK_M, delta)
    tl.store(turns + place, 0)
    if sink_parts is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        weights = tl.math.exp2((sink - tl.where(live, row_lse, float("inf"))) * LOG2E)
        tl.store(sink_parts + place, -tl.sum(weights * delta, 0))
    if _is_blind(first, rows, seq, query_start_loc, key_start_loc, num_seqs, window_right, BLOCK_M):
        PART: tl.constexpr = HEAD_SIZE & -HEAD_SIZE
        pointers = d_query + (tokens * D_QUERY_STRIDES[0] + head * D_QUERY_STRIDES[1])[:, None]
        for part in tl.static_range(0, HEAD_SIZE, PART):
            zeros = tl.zeros([BLOCK_M, PART], d_query.dtype.element_ty)
            tl.store(pointers + part + tl.arange(0, PART)[None, :], zeros, mask=(lanes < rows)[:, None])


@triton.jit
def finish_backward_kernel(
    query_start_loc,
    key_start_loc,
    d_query,
    d_query_sums,
    num_tokens,
    num_seqs,
    query_tiles,
    window_right,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D_QUERY_STRIDES: tl.constexpr,
):
    """Rounds the sums of a tile of queries, which lie as the matrix units leave them."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first, rows, seq = _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M)
    if not _is_blind(first, rows, seq, query_start_loc, key_start_loc, num_seqs, window_right, BLOCK_M):
        row = tl.arange(0, BLOCK_M)[:, None]
        column = tl.arange(0, HEAD_SIZE)[None, :]
        thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
        place = thread * 4 + row % 16 // 8 * 2 + column % 2 + column // 8 * (BLOCK_M * 8)
        sums = d_query_sums + (head * query_tiles + tile).to(tl.int64) * (BLOCK_M * HEAD_SIZE)
        values = tl.load(sums + place) * scale
        tokens = (first + row).to(tl.int64)
        cells = d_query + tokens * D_QUERY_STRIDES[0] + head * D_QUERY_STRIDES[1] + column
        tl.store(cells, values.to(d_query.dtype.element_ty), mask=row < rows)


@triton.jit
def _is_blind(first, rows, seq, query_start_loc, key_start_loc, num_seqs, window_right, BLOCK_M: tl.constexpr):
    """Whether no query of a tile sees a key, so that no tile of keys gives it a gradient.

    No query stands behind the last key: a window to the left leaves it one.
    """
    padding = seq == num_seqs
    seq = tl.where(padding, 0, seq)
    keys = tl.load(key_start_loc + seq + 1) - tl.load(key_start_loc + seq)
    position = keys + first - tl.load(query_start_loc + seq + 1)
    blind = padding | (keys == 0)
    if window_right is not None:
        blind = blind | (position + tl.minimum(rows, BLOCK_M) - 1 + window_right < 0)
    return blind


@triton.jit
def _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M: tl.constexpr):
    """(First row of a tile, rows from there to the end of its sequence, its sequence)."""
    low = 0
    high = num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // BLOCK_M + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(query_start_loc + low)
    end = tl.load(query_start_loc + low + 1, mask=low < num_seqs, other=0)
    end = tl.where(low == num_seqs, num_tokens, end)
    first = start + (tile - start // BLOCK_M - low) * BLOCK_M
    return first, end - first, low
