"""Attention for long queries: tiles of up to 128 query rows against a sequence's keys, paged or dense."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.dropout import dropout_of
from torch_core.device.mask import Bounds, Scoring, fully_visible_keys, tile_borders, visible_keys
from torch_core.device.softmax import finish_rows
from torch_core.device.step import attend_tile
from torch_core.device.store import Output, RowLayout, as_multiplied, query_tile, store_rows, zero_rows
from torch_core.device.tiles import KeyLayout, Keys, page_ids, readable
from torch_core.device.work import locate_tile


@triton.jit
def attention_rows_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start_loc,
    key_start_loc,
    alibi_slopes,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    k_scale_cache,
    v_scale_cache,
    mm_prefix_range,
    relative_bias,
    qq_bias,
    seq_causal,
    dropout_seeds,
    out_scale,
    out,
    lse,
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
    dropout_limit,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    MIN_QUERY: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    NEGATE: tl.constexpr,
    EXACT: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    DROPOUT_SEEDS_STRIDES: tl.constexpr,
):
    """One program: the query rows of BLOCK_M // PACK tokens times PACK heads of one key/value head.

    Grid: (query tiles of the batch by a static bound, key/value heads times head groups), or the other way round with
    HEADS_FIRST. Programs beyond the true tiles zero the rows of padded tokens. The last tile of a sequence comes
    first: under a causal mask it has the most keys. The loop over keys that every row sees has no mask; the keys at
    the edges come in a second loop. With IN_ORDER the left edge comes first, so that keys come in their order: no row's
    sums depend on the other rows of its tile.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    HEAD_GROUPS: tl.constexpr = (GROUP + PACK - 1) // PACK
    if HEADS_FIRST:
        tile = tl.program_id(1)
        head_program = tl.program_id(0)
    else:
        tile = tl.program_id(0)
        head_program = tl.program_id(1)
    kv_head = head_program // HEAD_GROUPS
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, TOKENS, MIN_QUERY)

    rows = tl.arange(0, BLOCK_M)
    in_group = head_program % HEAD_GROUPS * PACK + rows % PACK
    heads = kv_head * GROUP + in_group
    live_rows = (rows < TOKENS * PACK) & (in_group < GROUP)
    output = Output(out, lse, out_factor, v_scale, out_scale)
    OUT_LAYOUT: tl.constexpr = RowLayout(VALUE_SIZE, VALUE_PADDED, OUT_STRIDES, LSE_STRIDES, OUT_LIMIT)

    if tile >= total:
        padded = tl.load(query_start_loc + num_seqs) + (tile - total) * TOKENS + rows // PACK
        live = live_rows & (padded < num_tokens)
        zero_rows(output, padded, heads, live, OUT_LAYOUT)
        return

    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    if PAGED:
        seq_len = tl.load(seq_lens + seq)
        num_keys = tl.minimum(seq_len, table_tokens)
        block_table = block_tables + seq.to(tl.int64) * table_stride
        key_base = key_cache + kv_head * KEY_STRIDES[2]
        value_base = value_cache + kv_head * VALUE_STRIDES[2]
    else:
        key_start = tl.load(key_start_loc + seq)
        seq_len = tl.load(key_start_loc + seq + 1) - key_start
        num_keys = seq_len
        block_table = query_start_loc
        key_base = key_cache + key_start.to(tl.int64) * KEY_STRIDES[1] + kv_head * KEY_STRIDES[2]
        value_base = value_cache + key_start.to(tl.int64) * VALUE_STRIDES[1] + kv_head * VALUE_STRIDES[2]

    first_token = ((query_len + TOKENS - 1) // TOKENS - 1 - index) * TOKENS
    tokens = first_token + rows // PACK
    live = live_rows & (tokens < query_len)
    context = seq_len - query_len
    query_pos = context + tokens
    first_pos = context + first_token
    last_pos = context + tl.minimum(first_token + TOKENS, query_len) - 1
    q = query_tile(query, query_start + tokens, heads, live, HEAD_SIZE, HEAD_PADDED, QUERY_STRIDES, NEGATE)
    q = as_multiplied(q, key_cache)
    if q_scale is not None:
        scale *= tl.load(q_scale)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    if seq_causal is not None:
        window_right = tl.where(tl.load(seq_causal + seq) != 0, 0, window_right)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=live_rows, other=0.0).to(tl.float32)
    if relative_bias is not None:
        relative_bias += tl.where(live_rows, heads, 0) * relative_bias_size
    ranges = mm_prefix_range
    if mm_prefix_range is not None:
        ranges = mm_prefix_range + seq * (2 * NUM_RANGES)

    dropout = None
    if dropout_seeds is not None:
        # Rows are those of one head then, in order.
        tl.static_assert(PACK == 1)
        head = kv_head * GROUP + head_program % HEAD_GROUPS
        dropout = dropout_of(dropout_seeds, seq, head, dropout_limit, first_token, DROPOUT_SEEDS_STRIDES)

    if k_scale_cache is not None:
        k_scale_cache += kv_head * SCALE_STRIDES[2]
        v_scale_cache += kv_head * SCALE_STRIDES[2]

    keys = Keys(key_base, value_base, k_scale_cache, v_scale_cache)
    KEY_LAYOUT: tl.constexpr = KeyLayout(
        HEAD_SIZE, HEAD_PADDED, VALUE_SIZE, VALUE_PADDED, KEY_STRIDES, VALUE_STRIDES, SCALE_STRIDES, VALUE_OFFSET,
        BLOCK_SIZE, PAGED,
    )  # fmt: skip
    bounds = Bounds(window_left, window_right, attention_chunk)
    scoring = Scoring(
        scale, soft_cap, slopes, relative_bias, relative_bias_size, qq_bias, qq_bias_size, context, bounds, ranges,
        num_keys,
    )  # fmt: skip
    low, high = visible_keys(first_pos, last_pos, num_keys, bounds, NUM_RANGES)
    full_low, full_high = fully_visible_keys(first_pos, last_pos, num_keys, bounds)
    start, body_start, body_end, end = tile_borders(low, high, full_low, full_high, BLOCK_N, NUM_RANGES)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    left_tiles = (body_start - start) // BLOCK_N
    edge_tiles = left_tiles + (end - body_end) // BLOCK_N
    borders = (start, left_tiles, body_end - left_tiles * BLOCK_N)
    if IN_ORDER:
        acc, row_max, row_sum = _attend_edges(
            q, acc, row_max, row_sum, 0, left_tiles, borders, block_table, low, high, query_pos, keys, scoring,
            KEY_LAYOUT, BLOCK_N, STAGES, ALIBI_SQRT, NUM_RANGES, EXACT, dropout,
        )  # fmt: skip

    # The ids of the next tile's pages travel through the loop: loaded in the iteration that needs them, the load
    # would cost the software pipeline one of its buffers.
    pages = columns
    if PAGED:
        pages = page_ids(block_table, body_start + columns, None, body_end, BLOCK_SIZE)
    for position in tl.range(body_start, body_end, BLOCK_N, num_stages=STAGES):
        current = pages
        if PAGED:
            pages = page_ids(block_table, position + BLOCK_N + columns, None, body_end, BLOCK_SIZE)
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, current, position, columns, columns >= 0, query_pos, keys, scoring, KEY_LAYOUT,
            ALIBI_SQRT, NUM_RANGES, False, EXACT, dropout,
        )  # fmt: skip

    first_edge = left_tiles if IN_ORDER else 0
    acc, row_max, row_sum = _attend_edges(
        q, acc, row_max, row_sum, first_edge, edge_tiles, borders, block_table, low, high, query_pos, keys, scoring,
        KEY_LAYOUT, BLOCK_N, STAGES, ALIBI_SQRT, NUM_RANGES, EXACT, dropout,
    )  # fmt: skip

    inverse, row_lse = finish_rows(row_max, row_sum, sinks, heads, live_rows, EXACT)
    store_rows(output, acc * inverse[:, None], row_lse, query_start + tokens, heads, live, OUT_LAYOUT)


@triton.jit
def _attend_edges(
    q, acc, row_max, row_sum, first, last, borders, block_table, low, high, query_pos, keys, scoring,
    LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIBI_SQRT: tl.constexpr,
    NUM_RANGES: tl.constexpr, EXACT: tl.constexpr, dropout,
):  # fmt: skip
    """Takes the edge tiles [first, last) into the running softmax.

    `borders` are the left edge's first key, its number of tiles, and that key of which the right edge's first tile is
    as many tiles further.
    """
    start, left_tiles, right = borders
    columns = tl.arange(0, BLOCK_N)
    for i in tl.range(first, last, num_stages=STAGES):
        position = tl.where(i < left_tiles, start, right) + i * BLOCK_N
        position = tl.multiple_of(position, BLOCK_N)
        key_pos = position + columns
        pages = columns
        if LAYOUT.PAGED:
            pages = page_ids(block_table, key_pos, low, high, LAYOUT.BLOCK_SIZE)
        acc, row_max, row_sum = attend_tile(
            q, acc, row_max, row_sum, pages, position, columns, readable(key_pos, low, high), query_pos, keys, scoring,
            LAYOUT, ALIBI_SQRT, NUM_RANGES, True, EXACT, dropout,
        )  # fmt: skip
    return acc, row_max, row_sum
