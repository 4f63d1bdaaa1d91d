"""Merges partial results that several programs left in scratch, always in one order: no result depends on timing."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.dependent import wait_for_previous
from torch_core.device.mask import Bounds
from torch_core.device.softmax import finish_rows, rescale
from torch_core.device.store import Output, RowLayout, store_rows
from torch_core.device.work import chunk_span, chunked_keys, uneven_chunk


@triton.jit
def attention_combine_kernel(
    seq_lens,
    query_start_loc,
    sinks,
    v_scale,
    out_scale,
    partial_out,
    partial_max,
    partial_sum,
    out,
    lse,
    table_tokens,
    out_factor,
    window_left,
    attention_chunk,
    max_chunks,
    BLOCK_CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    FEW: tl.constexpr,
    SHARED: tl.constexpr,
    MIN_CHUNKS: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
):
    """One program: one query row of HEADS heads. Grid: (num_seqs * MAX_QUERY, NUM_HEADS / HEADS).

    Rows of sequences with fewer than MIN_CHUNKS chunks, or more than MAX_QUERY query rows, are finished elsewhere.
    With AHEAD, a sequence has at most BLOCK_CHUNKS chunks: they are fetched together with the lengths, which say their
    number, instead of after them. With DEPENDENT the launch may begin while the chunks are still made. With SHARED,
    which has room for all sequences, an uneven batch has chunks of its own, see `uneven_chunk`: one sequence's lie
    behind the other's.
    """
    seq = tl.program_id(0) // MAX_QUERY
    first_head = tl.program_id(1) * HEADS
    slot = tl.program_id(0).to(tl.int64) * max_chunks * NUM_HEADS + first_head
    i = tl.arange(0, BLOCK_CHUNKS)
    dims = tl.arange(0, VALUE_PADDED)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    size = 0
    if SHARED is not None:
        seqs = tl.arange(0, SHARED[2])
        num_seqs = tl.num_programs(0) // MAX_QUERY
        keys = chunked_keys(seqs, query_start_loc, seq_lens, num_seqs, table_tokens, MAX_QUERY)
        size = uneven_chunk(keys, table_tokens, max_chunks, CHUNK, LEAST, FEW, SHARED)
    if DEPENDENT:
        wait_for_previous()
    if AHEAD:
        fetched = _chunks(partial_out, partial_max, partial_sum, slot, i, i < max_chunks, dims, NUM_HEADS, VALUE_SIZE)
    bounds = Bounds(window_left, None, attention_chunk)
    _, chunks = chunk_span(seq_len, query_len, table_tokens, bounds, CHUNK, MAX_QUERY, LEAST, FEW)
    index = tl.program_id(0) % MAX_QUERY
    if SHARED is not None:  # noqa: SIM102, without it nothing is compiled
        if size > 0:
            counts = (keys + size - 1) // size
            chunks = tl.sum(tl.where(seqs == seq, counts, 0), 0)
            before = tl.sum(tl.where(seqs < seq, counts, 0), 0)
            slot = (before * MAX_QUERY + index * chunks).to(tl.int64) * NUM_HEADS + first_head
    if (chunks < MIN_CHUNKS) | (index >= query_len):
        return
    token = query_start + index
    for which in range(HEADS):
        head = first_head + which
        row_max = float("-inf")
        row_sum = 0.0
        acc = tl.zeros([VALUE_PADDED], tl.float32)
        for base in range(0, chunks, BLOCK_CHUNKS):
            there = base + i < chunks
            if AHEAD:
                maxima, sums, rows = fetched
                maxima = tl.where(there, maxima, float("-inf"))
                sums = tl.where(there, sums, 0.0)
                rows = tl.where(there[:, None], rows, 0.0)
            else:
                maxima, sums, rows = _chunks(
                    partial_out, partial_max, partial_sum, slot + which, base + i, there, dims, NUM_HEADS, VALUE_SIZE
                )
            new_max = tl.maximum(row_max, tl.max(maxima, 0))
            weights = rescale(maxima, new_max, EXACT)
            keep = rescale(row_max, new_max, EXACT)
            row_sum = row_sum * keep + tl.sum(sums * weights, 0)
            acc = acc * keep + tl.sum(rows * weights[:, None], 0)
            row_max = new_max
        heads = tl.full([1], 0, tl.int32) + head
        tokens = tl.full([1], 0, tl.int32) + token
        inverse, row_lse = finish_rows(
            tl.full([1], 0.0, tl.float32) + row_max, tl.full([1], 0.0, tl.float32) + row_sum, sinks, heads, heads >= 0,
            EXACT,
        )  # fmt: skip
        output = Output(out, lse, out_factor, v_scale, out_scale)
        LAYOUT: tl.constexpr = RowLayout(VALUE_SIZE, VALUE_PADDED, OUT_STRIDES, LSE_STRIDES, OUT_LIMIT)
        store_rows(output, acc[None, :] * inverse[:, None], row_lse, tokens, heads, heads >= 0, LAYOUT)


@triton.jit
def sum_parts_kernel(parts, result, num_parts, BLOCK: tl.constexpr):
    """result[i] = sum of parts[i, :num_parts], in a fixed order. Grid: (rows,)."""
    row = tl.program_id(0)
    parts += row.to(tl.int64) * num_parts
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_parts, BLOCK):
        total += tl.load(parts + first + columns, mask=first + columns < num_parts, other=0.0)
    tl.store(result + row, tl.sum(total, 0).to(result.dtype.element_ty))


@triton.jit
def _chunks(
    partial_out, partial_max, partial_sum, slot, chunks, there, dims, NUM_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr
):
    """Loads (maxima, sums, accumulated rows) of the row at `slot` for the chunks that are there."""
    slots = slot + chunks * NUM_HEADS
    maxima = tl.load(partial_max + slots, mask=there, other=float("-inf"))
    sums = tl.load(partial_sum + slots, mask=there, other=0.0)
    mask = there[:, None] & (dims < VALUE_SIZE)[None, :]
    rows = tl.load(partial_out + slots[:, None] * VALUE_SIZE + dims[None, :], mask=mask, other=0.0)
    return maxima, sums, rows
