"""The kernels before and after the Hopper backward kernel, which take tiles of queries.

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
    row_stats,
    d_query_sums,
    turns,
    sink_parts,
    num_tokens,
    num_seqs,
    query_tiles,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    D_OUT_STRIDES: tl.constexpr,
):
    """A program for each tile of queries and head: log-sum-exp in units of log 2 and the sums of out * d_out of its
    rows, and zeros where the queries' gradient will be summed. Rows that see no key get +inf, and so weights of 0.
    `sink_parts` [head, tile] are the tiles' shares of the gradients of sinks, which only the log-sum-exp knows of.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first, rows, padding = _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M)
    lanes = tl.arange(0, BLOCK_M)
    live = (lanes < rows) & (not padding)
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
    if turns is not None:
        tl.store(turns + place, 0)
    if sink_parts is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        weights = tl.math.exp2((sink - tl.where(live, row_lse, float("inf"))) * LOG2E)
        tl.store(sink_parts + place, -tl.sum(weights * delta, 0))
    CELLS: tl.constexpr = BLOCK_M * (HEAD_SIZE & -HEAD_SIZE)
    cells = tl.arange(0, CELLS)
    for part in tl.static_range(0, BLOCK_M * HEAD_SIZE, CELLS):
        tl.store(d_query_sums + place * (BLOCK_M * HEAD_SIZE) + part + cells, tl.zeros([CELLS], tl.float32))


@triton.jit
def finish_backward_kernel(
    d_query_sums,
    query_start_loc,
    d_query,
    num_tokens,
    num_seqs,
    query_tiles,
    scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D_QUERY_STRIDES: tl.constexpr,
):
    """A program for each tile of queries and head: rounds the summed gradient of the queries; padding has none."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first, rows, _ = _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M)
    if rows > 0:
        place = (head * query_tiles + tile).to(tl.int64)
        PART: tl.constexpr = HEAD_SIZE & -HEAD_SIZE
        for part in tl.static_range(0, HEAD_SIZE, PART):
            sums = d_query_sums + place * (BLOCK_M * HEAD_SIZE) + (part * BLOCK_M + tl.arange(0, BLOCK_M * PART))
            sums = tl.load(sums)
            # As the matrix units leave them: blocks of 8 columns; 16 rows of a warp; 8 rows; 2 columns; 8 rows below.
            sums = sums.reshape([PART // 8, BLOCK_M // 16, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5)
            sums = sums.reshape([BLOCK_M, PART]) * scale
            lanes = tl.arange(0, BLOCK_M)
            tokens = (first + lanes).to(tl.int64)
            pointers = d_query + (tokens * D_QUERY_STRIDES[0] + head * D_QUERY_STRIDES[1])[:, None]
            pointers += part + tl.arange(0, PART)[None, :]
            tl.store(pointers, sums.to(d_query.dtype.element_ty), mask=(lanes < rows)[:, None])


@triton.jit
def _tile_rows(tile, query_start_loc, num_tokens, num_seqs, BLOCK_M: tl.constexpr):
    """(First row of a tile, rows from there to the end of its sequence, whether they are padding)."""
    low = 0
    high = num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // BLOCK_M + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    padding = low == num_seqs
    start = tl.load(query_start_loc + low)
    end = tl.load(query_start_loc + low + 1, mask=low < num_seqs, other=0)
    end = tl.where(padding, num_tokens, end)
    first = start + (tile - start // BLOCK_M - low) * BLOCK_M
    return first, end - first, padding
