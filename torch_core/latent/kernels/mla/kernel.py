"""Attention to cached latents, in key chunks of a fixed size: a token's row is read once, as key and as value.

The split kernel's way (see split.kernel) for heads whose keys are one shared row: the heads of all query tokens of a
sequence are rows of one matrix, cut into tiles of BLOCK_M.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.dependent import let_next_begin
from torch_core.device.mask import Bounds, Scoring, tile_scores, visible_keys
from torch_core.device.quantize import packed_rotary, unpacked_latents
from torch_core.device.softmax import finish_rows, softmax_step
from torch_core.device.store import Output, RowLayout, as_multiplied, query_tile, store_rows, zero_rows
from torch_core.device.tiles import key_rows, load_tile, page_ids, readable
from torch_core.device.work import chunk_span, equal_chunk, locate_chunk


@triton.jit
def latent_attention_kernel(
    query,
    latent_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    sinks,
    q_scale,
    k_scale,
    v_scale,
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
    max_chunks,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    FEW: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    ROW_TILES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEGATE: tl.constexpr,
    EXACT: tl.constexpr,
    PACKED: tl.constexpr,
    MERGED: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
):
    """One program: one chunk of a sequence's latents, with one tile of its rows (query token, head).

    Grid: ((chunks of the batch by a static bound, plus padding) * ROW_TILES,). A sequence with one chunk is finished
    here; the others leave their running softmax as attention_split_kernel does, for attention_combine_kernel. Programs
    past the last chunk zero the rows of padded tokens. With MERGED the merge may begin, and waits.
    """
    if MERGED:
        let_next_begin()
    item = tl.program_id(0) // ROW_TILES
    rows = tl.program_id(0) % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    live_rows = tokens < MAX_QUERY
    columns = tl.arange(0, BLOCK_N)
    output = Output(out, lse, out_factor, v_scale, out_scale)
    OUT_LAYOUT: tl.constexpr = RowLayout(VALUE_SIZE, VALUE_PADDED, OUT_STRIDES, LSE_STRIDES, OUT_LIMIT)
    bounds = Bounds(window_left, window_right, attention_chunk)
    seq, index, total, _ = locate_chunk(
        item, query_start_loc, seq_lens, num_seqs, table_tokens, bounds, BLOCK_SEQS, CHUNK, MAX_QUERY, None, LEAST, FEW
    )
    if item >= total:
        padded = tl.load(query_start_loc + num_seqs) + (item - total) * MAX_QUERY + tokens
        zero_rows(output, padded, heads, live_rows & (padded < num_tokens), OUT_LAYOUT)
        return

    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    first_token = tl.program_id(0) % ROW_TILES * BLOCK_M // NUM_HEADS
    if first_token >= query_len:
        return
    if q_scale is not None:
        scale *= tl.load(q_scale)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    seq_len = tl.load(seq_lens + seq)
    num_keys = tl.minimum(seq_len, table_tokens)
    first_chunk, chunks = chunk_span(seq_len, query_len, table_tokens, bounds, CHUNK, MAX_QUERY, LEAST, FEW)
    chunk = CHUNK if LEAST is None else equal_chunk(seq_len, table_tokens, chunks)
    live = live_rows & (tokens < query_len)
    context = seq_len - query_len
    query_pos = context + tokens
    q = query_tile(query, query_start + tokens, heads, live, VALUE_SIZE, VALUE_PADDED, QUERY_STRIDES, NEGATE)
    q = _as_multiplied(q, latent_cache, PACKED)
    if ROPE_SIZE > 0:
        q_rope = query_tile(
            query + VALUE_SIZE, query_start + tokens, heads, live, ROPE_SIZE, ROPE_PADDED, QUERY_STRIDES, NEGATE
        )
        q_rope = _as_multiplied(q_rope, latent_cache, PACKED)
    block_table = block_tables + seq.to(tl.int64) * table_stride

    start = (first_chunk + index) * chunk
    last_token = tl.minimum((first_token * NUM_HEADS + NUM_HEADS - 1 + BLOCK_M) // NUM_HEADS, query_len - 1)
    low, high = visible_keys(context + first_token, context + last_token, num_keys, bounds, 0)
    high = tl.minimum(high, start + chunk)
    first_key = None
    if window_left is not None or attention_chunk is not None:
        first_key = tl.maximum(low, start)
        start = tl.multiple_of(first_key // BLOCK_N * BLOCK_N, BLOCK_N)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
    scoring = Scoring(scale, soft_cap, None, None, None, None, None, context, bounds, None, num_keys)
    pages = page_ids(block_table, start + columns, first_key, high, BLOCK_SIZE)
    for position in tl.range(start, high, BLOCK_N, num_stages=STAGES):
        key_pos = position + columns
        # Block ids are loaded one step ahead.
        current = pages
        pages = page_ids(block_table, key_pos + BLOCK_N, first_key, high, BLOCK_SIZE)
        inside = readable(key_pos, first_key, high)
        pointers = key_rows(latent_cache, current, position, columns, KEY_STRIDES, BLOCK_SIZE, True)
        if PACKED:
            latents = unpacked_latents(pointers, inside, VALUE_SIZE, VALUE_PADDED, q.dtype)
            pointers = packed_rotary(pointers, VALUE_SIZE)
        else:
            latents = load_tile(pointers, inside, VALUE_SIZE, VALUE_PADDED, True).to(q.dtype)
            pointers += VALUE_SIZE
        products = _products(q, latents, EXACT)
        if ROPE_SIZE > 0:
            rotary = load_tile(pointers, inside, ROPE_SIZE, ROPE_PADDED, True).to(q.dtype)
            if EXACT:
                products = _sum(products, _products(q_rope, rotary, True))
            else:
                products = tl.dot(q_rope, tl.trans(rotary), products)
        scores, factor = tile_scores(products, query_pos, key_pos, None, scoring, False, 0, True, EXACT)
        weights, keep, row_max, row_sum = softmax_step(scores, factor, row_max, row_sum, EXACT)
        if EXACT:
            # See step.attend_tile.
            tile = tl.dot(weights, latents, input_precision="ieee")
            acc = tl.math.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), tile)
        else:
            acc = tl.dot(weights.to(q.dtype), latents, acc * keep[:, None])

    if chunks == 1:
        inverse, row_lse = finish_rows(row_max, row_sum, sinks, heads, live_rows, EXACT)
        store_rows(output, acc * inverse[:, None], row_lse, query_start + tokens, heads, live, OUT_LAYOUT)
    elif partial_out is not None:
        slots = ((seq.to(tl.int64) * MAX_QUERY + tokens) * max_chunks + index) * NUM_HEADS + heads
        dims = tl.arange(0, VALUE_PADDED)
        mask = live[:, None] & (dims < VALUE_SIZE)[None, :]
        tl.store(partial_out + slots[:, None] * VALUE_SIZE + dims[None, :], acc, mask=mask)
        tl.store(partial_max + slots, row_max, mask=live)
        tl.store(partial_sum + slots, row_sum, mask=live)


@triton.jit
def _as_multiplied(q, latent_cache, PACKED: tl.constexpr):
    if not PACKED:
        q = as_multiplied(q, latent_cache)
    elif q.dtype.primitive_bitwidth == 8:
        # bfloat16 holds every e4m3 times its scale; the only conversion goes by way of float16.
        q = q.to(tl.float16).to(tl.bfloat16)
    return q


@triton.jit
def _products(q, latents, EXACT: tl.constexpr):
    """q @ latents^T in fp32; EXACT ones in chains of at most 64 additions, which lose few digits."""
    if EXACT and q.shape[1] > 64:
        half: tl.constexpr = q.shape[1] // 2
        q_even, q_odd = tl.split(tl.reshape(q, [q.shape[0], half, 2]))
        even, odd = tl.split(tl.reshape(latents, [latents.shape[0], half, 2]))
        products = _sum(_products(q_even, even, True), _products(q_odd, odd, True))
    else:
        products = tl.dot(q, tl.trans(latents), input_precision="ieee")
    return products


@triton.jit
def _sum(a, b):
    # Fused, or the compiler makes one chain of two products.
    return tl.math.fma(a, tl.full(a.shape, 1.0, tl.float32), b)
