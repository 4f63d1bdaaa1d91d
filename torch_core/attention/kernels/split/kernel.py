"""Attention for short queries (decode, speculative rows): chunks of keys, each with a sum of its own.

Flash-decoding (Dao et al., 2023) with chunks that follow from shapes and a sequence's own length, never from the batch:
a sequence is cut at the same keys whatever its neighbours are, so its result does not depend on them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.attention.kernels.split.pairs import attend_pairs
from torch_core.device.dependent import let_next_begin, wait_for_previous
from torch_core.device.mask import Bounds, Scoring, visible_keys
from torch_core.device.softmax import finish_rows
from torch_core.device.step import attend_tile
from torch_core.device.store import Output, RowLayout, as_multiplied, query_tile, store_rows, zero_rows
from torch_core.device.tiles import KeyLayout, Keys, page_ids, readable
from torch_core.device.work import chunk_span, equal_chunk, locate_chunk


@triton.jit
def attention_split_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    k_scale_cache,
    v_scale_cache,
    relative_bias,
    qq_bias,
    seq_causal,
    out_scale,
    out,
    lse,
    partial_out,
    partial_max,
    partial_sum,
    num_tokens,
    num_seqs,
    table_stride,
    table_tokens,
    scale,
    out_factor,
    soft_cap,
    window_left,
    window_right,
    attention_chunk,
    relative_bias_size,
    qq_bias_size,
    max_chunks,
    BLOCK_SEQS: tl.constexpr,
    LONG: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    FEW: tl.constexpr,
    RUNS: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    NEGATE: tl.constexpr,
    EXACT: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    MERGED: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
):
    """One program: one chunk, or a run of them, of one key/value head, with all the query rows of the head.

    Grid: (chunks of the batch by a static bound, plus padding, times head programs,). Sequences with more than
    MAX_QUERY query rows are left to another kernel. A sequence with one chunk is finished here; the others leave
    their running softmax in partial_out[row, chunk, head, :], partial_max[row, chunk, head] and partial_sum, row =
    sequence * MAX_QUERY + query row, for attention_combine_kernel. With ZERO_PADDING, programs past the last chunk
    zero the rows of padded tokens. CHUNK, LEAST and FEW say how many chunks a sequence has, see `chunk_span`. With
    RUNS a program takes several of them where a batch has many, see `locate_chunk`. With PAIRS, 8-bit keys and values
    are read two at a time, see split.pairs. With DEPENDENT the launch in front may still run. With MERGED the merge
    may begin, and waits.
    """
    HEAD_GROUPS: tl.constexpr = (GROUP + PACK - 1) // PACK
    HEAD_PROGRAMS: tl.constexpr = NUM_KV_HEADS * HEAD_GROUPS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    # First: the merge reads lengths before it waits, and the launch in front may write them.
    if DEPENDENT:
        wait_for_previous()
    if MERGED:
        let_next_begin()
    # The heads of a chunk are neighbours in memory and in the grid.
    item = tl.program_id(0) // HEAD_PROGRAMS
    kv_head = tl.program_id(0) % HEAD_PROGRAMS // HEAD_GROUPS
    rows = tl.arange(0, BLOCK_M)
    tokens = rows // PACK
    in_group = tl.program_id(0) % HEAD_GROUPS * PACK + rows % PACK
    heads = kv_head * GROUP + in_group
    live_rows = (rows < MAX_QUERY * PACK) & (in_group < GROUP)
    columns = tl.arange(0, BLOCK_N)
    output = Output(out, lse, out_factor, v_scale, out_scale)
    OUT_LAYOUT: tl.constexpr = RowLayout(VALUE_SIZE, VALUE_PADDED, OUT_STRIDES, LSE_STRIDES, OUT_LIMIT)
    # A single sequence is fetched together with its lengths: its row of the table may be read to its end, and
    # its queries are the first ones. Chunks that follow from its length are expected to be those of a full table.
    SINGLE: tl.constexpr = BLOCK_SEQS == 1 and window_left is None and attention_chunk is None
    if SINGLE and LEAST is not None:
        _, most_chunks = chunk_span(table_tokens, 1, table_tokens, Bounds(None, None, None), CHUNK, 1, LEAST, FEW)
        expected = equal_chunk(table_tokens, table_tokens, most_chunks)
    elif SINGLE:
        expected: tl.constexpr = CHUNK
    if SINGLE:
        bound = tl.where(item < max_chunks, table_tokens, 0)
        pages = page_ids(block_tables, item * expected + columns, None, bound, BLOCK_SIZE)
    bounds = Bounds(window_left, window_right, attention_chunk)
    seq, index, total, each = locate_chunk(
        item, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, BLOCK_SEQS, CHUNK, MAX_QUERY, LONG,
        LEAST, FEW, RUNS,
    )  # fmt: skip
    if SINGLE:
        present = live_rows & (tokens < num_tokens)
        q = query_tile(query, tokens, heads, present, HEAD_SIZE, HEAD_PADDED, QUERY_STRIDES, NEGATE)

    if item >= total:
        if ZERO_PADDING:
            padded = tl.load(query_start_loc + num_seqs) + (item - total) * MAX_QUERY + tokens
            live = live_rows & (padded < num_tokens)
            zero_rows(output, padded, heads, live, OUT_LAYOUT)
        return

    if q_scale is not None:
        scale *= tl.load(q_scale)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    num_keys = tl.minimum(seq_len, table_tokens)
    first_chunk, chunks = chunk_span(seq_len, query_len, table_tokens, bounds, CHUNK, MAX_QUERY, LEAST, FEW)
    if LEAST is not None:
        chunk = equal_chunk(seq_len, table_tokens, chunks)
    else:
        chunk: tl.constexpr = CHUNK
    live = live_rows & (tokens < query_len)
    context = seq_len - query_len
    query_pos = context + tokens
    if not SINGLE:
        q = query_tile(query, query_start + tokens, heads, live, HEAD_SIZE, HEAD_PADDED, QUERY_STRIDES, NEGATE)
    q = as_multiplied(q, key_cache)
    if seq_causal is not None:
        bounds = Bounds(window_left, tl.where(tl.load(seq_causal + seq) != 0, 0, window_right), attention_chunk)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=live_rows, other=0.0).to(tl.float32)
    if relative_bias is not None:
        relative_bias += tl.where(live_rows, heads, 0) * relative_bias_size
    if k_scale_cache is not None:
        k_scale_cache += kv_head * SCALE_STRIDES[2]
        v_scale_cache += kv_head * SCALE_STRIDES[2]
    block_table = block_tables + seq.to(tl.int64) * table_stride

    # The compiler must see that tiles start at multiples of the chunk: it then finds the keys that share a
    # block without arithmetic in the loop.
    slot = index * each
    start = (first_chunk + slot) * chunk
    low, high = visible_keys(context, context + query_len - 1, num_keys, bounds, 0)
    high = tl.minimum(high, start + chunk * each)
    stop = start + chunk
    first_key = None
    if window_left is not None or attention_chunk is not None:
        first_key = tl.maximum(low, start)
        start = tl.multiple_of(first_key // BLOCK_N * BLOCK_N, BLOCK_N)
    key_base = key_cache + kv_head * KEY_STRIDES[2]
    value_base = value_cache + kv_head * VALUE_STRIDES[2]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if PAIRS:
        q_even, q_odd = tl.split(tl.reshape(q, [BLOCK_M, HEAD_PADDED // 2, 2]))
        key_base = key_base.to(tl.pointer_type(tl.int16))
        value_base = value_base.to(tl.pointer_type(tl.int16))
        acc_even = tl.zeros([BLOCK_M, VALUE_PADDED // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, VALUE_PADDED // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)

    keys = Keys(key_base, value_base, k_scale_cache, v_scale_cache)
    KEY_LAYOUT: tl.constexpr = KeyLayout(
        HEAD_SIZE, HEAD_PADDED, VALUE_SIZE, VALUE_PADDED, KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES, VALUE_OFFSET,
        BLOCK_SIZE, True,
    )  # fmt: skip
    scoring = Scoring(
        scale, soft_cap, slopes, relative_bias, relative_bias_size, qq_bias, qq_bias_size, context, bounds, None,
        num_keys,
    )  # fmt: skip
    if SINGLE:
        if LEAST is not None:  # noqa: SIM102, without it nothing is compiled
            if chunk != expected:
                pages = page_ids(block_tables, start + columns, None, high, BLOCK_SIZE)
        pages = tl.where(start + columns < high, pages, 0)
    else:
        pages = page_ids(block_table, start + columns, first_key, high, BLOCK_SIZE)
    for position in tl.range(start, high, BLOCK_N, num_stages=STAGES):
        key_pos = position + columns
        # Block ids are loaded one step ahead.
        current = pages
        pages = page_ids(block_table, key_pos + BLOCK_N, first_key, high, BLOCK_SIZE)
        inside = readable(key_pos, first_key, high)
        if PAIRS:
            acc_even, acc_odd, row_max, row_sum = attend_pairs(
                q_even, q_odd, acc_even, acc_odd, row_max, row_sum, current, position, columns, inside, query_pos, keys,
                scoring, key_cache.dtype.element_ty, KEY_LAYOUT, ALIBI_SQRT,
            )  # fmt: skip
        else:
            acc, row_max, row_sum = attend_tile(
                q, acc, row_max, row_sum, current, position, columns, inside, query_pos, keys, scoring, KEY_LAYOUT,
                ALIBI_SQRT, 0, True, EXACT,
            )  # fmt: skip
        if RUNS is not None:  # noqa: SIM102, without it nothing is compiled
            if (position + BLOCK_N == stop) & (stop < high):
                _store_chunk(
                    partial_out, partial_max, partial_sum, acc, row_max, row_sum, seq, slot, max_chunks, tokens, heads,
                    live, MAX_QUERY, NUM_HEADS, VALUE_SIZE, True,
                )  # fmt: skip
                acc = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
                row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_M], tl.float32)
                slot += 1
                stop += chunk
    if PAIRS:
        acc = tl.reshape(tl.join(acc_even, acc_odd), [BLOCK_M, VALUE_PADDED])

    if chunks == 1:
        inverse, row_lse = finish_rows(row_max, row_sum, sinks, heads, live_rows, EXACT)
        store_rows(output, acc * inverse[:, None], row_lse, query_start + tokens, heads, live, OUT_LAYOUT)
    elif partial_out is not None:
        _store_chunk(
            partial_out, partial_max, partial_sum, acc, row_max, row_sum, seq, slot, max_chunks, tokens, heads, live,
            MAX_QUERY, NUM_HEADS, VALUE_SIZE, RUNS is not None,
        )  # fmt: skip


@triton.jit
def _store_chunk(
    partial_out, partial_max, partial_sum, acc, row_max, row_sum, seq, chunk, max_chunks, tokens, heads, live,
    MAX_QUERY: tl.constexpr, NUM_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, IN_HALVES: tl.constexpr,
):  # fmt: skip
    """Stores the running softmax of a chunk's rows; in halves it takes half of the shared memory."""
    row = seq.to(tl.int64) * MAX_QUERY + tokens
    slots = (row * max_chunks + chunk) * NUM_HEADS + heads
    HALF: tl.constexpr = acc.shape[1] // 2
    parts = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, HALF]), (0, 2, 1))) if IN_HALVES else (acc,)
    for part in tl.static_range(2 if IN_HALVES else 1):
        dims = part * HALF + tl.arange(0, parts[0].shape[1])
        mask = live[:, None] & (dims < VALUE_SIZE)[None, :]
        tl.store(partial_out + slots[:, None] * VALUE_SIZE + dims[None, :], parts[part], mask=mask)
    tl.store(partial_max + slots, row_max, mask=live)
    tl.store(partial_sum + slots, row_sum, mask=live)
