"""The gradients of dense attention without atomic additions: queries from one kernel, keys and values from another.

The recomputation of the weights from the log-sum-exp is FlashAttention-2's (arXiv 2307.08691). Each kernel computes
the weights of its own tiles, so that every sum has one owner and a fixed order: the results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.attention.kernels.backward.step import add_product, load_rows, score_slope, tile_weights
from torch_core.device.dropout import dropout_of, kept_weights
from torch_core.device.mask import (
    LOG2E,
    Bounds,
    Scoring,
    alibi_distance,
    fully_visible_keys,
    fully_visible_queries,
    tile_borders,
    visible_keys,
    visible_queries,
)
from torch_core.device.step import row_products
from torch_core.device.store import query_tile
from torch_core.device.tiles import readable
from torch_core.device.work import locate_tile


@triton.jit
def backward_queries_kernel(
    query,
    key,
    value,
    out,
    lse,
    d_out,
    d_lse,
    query_start_loc,
    key_start_loc,
    alibi_slopes,
    sinks,
    mm_prefix_range,
    seq_causal,
    dropout_seeds,
    d_query,
    delta,
    row_lse,
    slope_parts,
    sink_parts,
    num_tokens,
    num_seqs,
    scale,
    soft_cap,
    window_left,
    window_right,
    attention_chunk,
    dropout_limit,
    keep_factor,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    NEGATE: tl.constexpr,
    EXACT: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    D_OUT_STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
    D_LSE_STRIDES: tl.constexpr,
    D_QUERY_STRIDES: tl.constexpr,
    DROPOUT_SEEDS_STRIDES: tl.constexpr,
):
    """One program: the gradient of BLOCK_M query rows of one head, and two numbers of each for `backward_keys_kernel`.

    Grid: (query tiles of the batch by a static bound, query heads). Programs beyond the true tiles zero the gradient of
    padded tokens. `delta` is the reference of a row's gradients, sum(d_out * out) - d_lse, and `row_lse` its
    log-sum-exp with inf for rows that saw no key: both [num_heads, num_tokens], so that a tile reads them in one go.
    `slope_parts` and `sink_parts` [num_heads, tiles] are the program's shares of the gradients of slopes and sinks.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    seq, index, total = locate_tile(tile, query_start_loc, num_seqs, BLOCK_SEQS, BLOCK_M, 1)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PADDED)
    part = head * tl.num_programs(0) + tile

    if tile >= total:
        padded = tl.load(query_start_loc + num_seqs) + (tile - total) * BLOCK_M + rows
        pointers = d_query + padded.to(tl.int64) * D_QUERY_STRIDES[0] + head * D_QUERY_STRIDES[1]
        zeros = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32).to(d_query.dtype.element_ty)
        tl.store(
            pointers[:, None] + dims[None, :], zeros, mask=(padded < num_tokens)[:, None] & (dims < HEAD_SIZE)[None, :]
        )
        if slope_parts is not None:
            tl.store(slope_parts + part, 0.0)
        if sink_parts is not None:
            tl.store(sink_parts + part, 0.0)
        return

    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    key_start = tl.load(key_start_loc + seq)
    num_keys = tl.load(key_start_loc + seq + 1) - key_start
    # Under a causal mask the last tile has the most keys: it comes first.
    first_token = ((query_len + BLOCK_M - 1) // BLOCK_M - 1 - index) * BLOCK_M
    tokens = first_token + rows
    live = tokens < query_len
    context = num_keys - query_len
    query_pos = context + tokens
    packed = query_start + tokens

    q = query_tile(query, packed, head, live, HEAD_SIZE, HEAD_PADDED, QUERY_STRIDES, NEGATE)
    gradient = query_tile(d_out, packed, head, live, VALUE_SIZE, VALUE_PADDED, D_OUT_STRIDES, False)
    result = query_tile(out, packed, head, live, VALUE_SIZE, VALUE_PADDED, OUT_STRIDES, False)
    row_delta = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
    gradient = gradient.to(q.dtype)
    rows64 = packed.to(tl.int64)
    logsum = tl.load(lse + rows64 * LSE_STRIDES[0] + head * LSE_STRIDES[1], mask=live, other=float("-inf"))
    seen = logsum > float("-inf")
    if d_lse is not None:
        row_delta -= tl.load(d_lse + rows64 * D_LSE_STRIDES[0] + head * D_LSE_STRIDES[1], mask=seen, other=0.0)
    row_delta = tl.where(seen, row_delta, 0.0)
    if not EXACT:
        logsum = logsum * LOG2E
    logsum = tl.where(seen, logsum, float("inf"))
    place = head.to(tl.int64) * num_tokens + packed
    tl.store(delta + place, row_delta, mask=live)
    tl.store(row_lse + place, logsum, mask=live)
    if sink_parts is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        weights = tl.math.exp2((sink - logsum) * LOG2E) if EXACT else tl.math.exp2(sink * LOG2E - logsum)
        tl.store(sink_parts + part, -tl.sum(weights * row_delta, 0))

    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head + rows * 0).to(tl.float32)
    ranges = mm_prefix_range
    if mm_prefix_range is not None:
        ranges = mm_prefix_range + seq * (2 * NUM_RANGES)
    if seq_causal is not None:
        window_right = tl.where(tl.load(seq_causal + seq) != 0, 0, window_right)
    bounds = Bounds(window_left, window_right, attention_chunk)
    scoring = Scoring(scale, soft_cap, slopes, None, None, None, None, context, bounds, ranges, num_keys)
    dropout = None
    if dropout_seeds is not None:
        dropout = dropout_of(dropout_seeds, seq, head, dropout_limit, first_token, DROPOUT_SEEDS_STRIDES)
    first_pos = context + first_token
    last_pos = context + tl.minimum(first_token + BLOCK_M, query_len) - 1
    low, high = visible_keys(first_pos, last_pos, num_keys, bounds, NUM_RANGES)
    full_low, full_high = fully_visible_keys(first_pos, last_pos, num_keys, bounds)
    start, body_start, body_end, end = tile_borders(low, high, full_low, full_high, BLOCK_N, NUM_RANGES)

    key += key_start.to(tl.int64) * KEY_STRIDES[0] + kv_head * KEY_STRIDES[1]
    value += key_start.to(tl.int64) * VALUE_STRIDES[0] + kv_head * VALUE_STRIDES[1]
    columns = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)

    for position in tl.range(body_start, body_end, BLOCK_N, num_stages=STAGES):
        k = load_rows(key, position, columns, None, KEY_STRIDES[0], HEAD_SIZE, HEAD_PADDED, False)
        v = load_rows(value, position, columns, None, VALUE_STRIDES[0], VALUE_SIZE, VALUE_PADDED, False)
        acc, slope_sum = _query_step(
            q, gradient, k, v, acc, slope_sum, query_pos, position + columns, logsum, row_delta, scoring, dropout,
            position, keep_factor, ALIBI_SQRT, NUM_RANGES, False, EXACT,
        )  # fmt: skip

    left_tiles = (body_start - start) // BLOCK_N
    edge_tiles = left_tiles + (end - body_end) // BLOCK_N
    for i in tl.range(0, edge_tiles, num_stages=STAGES):
        position = tl.where(i < left_tiles, start, body_end - left_tiles * BLOCK_N) + i * BLOCK_N
        key_pos = position + columns
        inside = readable(key_pos, low, high)
        k = load_rows(key, position, columns, inside, KEY_STRIDES[0], HEAD_SIZE, HEAD_PADDED, True)
        v = load_rows(value, position, columns, inside, VALUE_STRIDES[0], VALUE_SIZE, VALUE_PADDED, True)
        acc, slope_sum = _query_step(
            q, gradient, k, v, acc, slope_sum, query_pos, key_pos, logsum, row_delta, scoring, dropout,
            position, keep_factor, ALIBI_SQRT, NUM_RANGES, True, EXACT,
        )  # fmt: skip

    if slope_parts is not None:
        tl.store(slope_parts + part, tl.sum(slope_sum, 0))
    _store_gradient(d_query, acc, scale, packed, head, live, HEAD_SIZE, D_QUERY_STRIDES, NEGATE)


@triton.jit
def backward_keys_kernel(
    query,
    key,
    value,
    d_out,
    query_start_loc,
    key_start_loc,
    alibi_slopes,
    mm_prefix_range,
    seq_causal,
    dropout_seeds,
    delta,
    row_lse,
    d_key,
    d_value,
    num_tokens,
    num_key_rows,
    num_seqs,
    scale,
    soft_cap,
    window_left,
    window_right,
    attention_chunk,
    dropout_limit,
    keep_factor,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    NEGATE: tl.constexpr,
    EXACT: tl.constexpr,
    QUERY_STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    D_OUT_STRIDES: tl.constexpr,
    D_KEY_STRIDES: tl.constexpr,
    D_VALUE_STRIDES: tl.constexpr,
    DROPOUT_SEEDS_STRIDES: tl.constexpr,
):
    """One program: the gradients of BLOCK_N keys and values of one key/value head, summed over its query heads.

    Grid: (key tiles of the batch by a static bound, key/value heads). Programs beyond the true tiles zero the gradients
    of padded keys. One loop visits the query tiles of all heads of the group, so that it is one pipeline: first those
    that need no mask, then those at the edges. Scores are [keys, queries]: as left operands of the products that follow
    they stay in registers.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, index, total = locate_tile(tile, key_start_loc, num_seqs, BLOCK_SEQS, BLOCK_N, 1)
    rows = tl.arange(0, BLOCK_N)
    acc_key = tl.zeros([BLOCK_N, HEAD_PADDED], tl.float32)
    acc_value = tl.zeros([BLOCK_N, VALUE_PADDED], tl.float32)

    if tile >= total:
        padded = tl.load(key_start_loc + num_seqs) + (tile - total) * BLOCK_N + rows
        live = padded < num_key_rows
        _store_gradient(d_key, acc_key, 1.0, padded, kv_head, live, HEAD_SIZE, D_KEY_STRIDES, False)
        _store_gradient(d_value, acc_value, 1.0, padded, kv_head, live, VALUE_SIZE, D_VALUE_STRIDES, False)
        return

    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    key_start = tl.load(key_start_loc + seq)
    num_keys = tl.load(key_start_loc + seq + 1) - key_start
    context = num_keys - query_len
    first_key = index * BLOCK_N
    key_pos = first_key + rows
    live = key_pos < num_keys
    packed = key_start + key_pos
    # The negated keys stand for negated queries, which come tile by tile.
    k = query_tile(key, packed, kv_head, live, HEAD_SIZE, HEAD_PADDED, KEY_STRIDES, NEGATE)
    v = query_tile(value, packed, kv_head, live, VALUE_SIZE, VALUE_PADDED, VALUE_STRIDES, False)

    ranges = mm_prefix_range
    if mm_prefix_range is not None:
        ranges = mm_prefix_range + seq * (2 * NUM_RANGES)
    if seq_causal is not None:
        window_right = tl.where(tl.load(seq_causal + seq) != 0, 0, window_right)
    bounds = Bounds(window_left, window_right, attention_chunk)
    last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    low, high = visible_queries(first_key, last_key, context, num_keys, bounds, NUM_RANGES)
    full_low, full_high = fully_visible_queries(first_key, last_key, context, num_keys, bounds)
    # Tiles of queries are counted from the first row; positions may be negative.
    low -= context
    high -= context
    start, body_start, body_end, end = tile_borders(
        low, high, full_low - context, full_high - context, BLOCK_M, NUM_RANGES
    )

    if dropout_seeds is not None:
        dropout_seeds += seq * DROPOUT_SEEDS_STRIDES[0]
    query += query_start.to(tl.int64) * QUERY_STRIDES[0]
    d_out += query_start.to(tl.int64) * D_OUT_STRIDES[0]
    delta += query_start
    row_lse += query_start
    columns = tl.arange(0, BLOCK_M)

    body_tiles = (body_end - body_start) // BLOCK_M
    for i in tl.range(0, body_tiles * GROUP, num_stages=STAGES):
        head = kv_head * GROUP + i // tl.maximum(body_tiles, 1)
        position = body_start + i % tl.maximum(body_tiles, 1) * BLOCK_M
        acc_key, acc_value = _key_step(
            query, d_out, delta, row_lse, k, v, acc_key, acc_value, head, position, columns, None, context, key_pos,
            num_tokens, num_keys, alibi_slopes, scale, soft_cap, bounds, ranges, dropout_seeds, dropout_limit,
            keep_factor, first_key, HEAD_SIZE, HEAD_PADDED, VALUE_SIZE, VALUE_PADDED, QUERY_STRIDES, D_OUT_STRIDES,
            DROPOUT_SEEDS_STRIDES, ALIBI_SQRT, NUM_RANGES, False, EXACT,
        )  # fmt: skip

    left_tiles = (body_start - start) // BLOCK_M
    edge_tiles = left_tiles + (end - body_end) // BLOCK_M
    for i in tl.range(0, edge_tiles * GROUP, num_stages=STAGES):
        head = kv_head * GROUP + i // tl.maximum(edge_tiles, 1)
        edge = i % tl.maximum(edge_tiles, 1)
        position = tl.where(edge < left_tiles, start, body_end - left_tiles * BLOCK_M) + edge * BLOCK_M
        inside = readable(position + columns, low, high)
        acc_key, acc_value = _key_step(
            query, d_out, delta, row_lse, k, v, acc_key, acc_value, head, position, columns, inside, context, key_pos,
            num_tokens, num_keys, alibi_slopes, scale, soft_cap, bounds, ranges, dropout_seeds, dropout_limit,
            keep_factor, first_key, HEAD_SIZE, HEAD_PADDED, VALUE_SIZE, VALUE_PADDED, QUERY_STRIDES, D_OUT_STRIDES,
            DROPOUT_SEEDS_STRIDES, ALIBI_SQRT, NUM_RANGES, True, EXACT,
        )  # fmt: skip

    _store_gradient(d_key, acc_key, scale, packed, kv_head, live, HEAD_SIZE, D_KEY_STRIDES, NEGATE)
    _store_gradient(d_value, acc_value, keep_factor, packed, kv_head, live, VALUE_SIZE, D_VALUE_STRIDES, False)


@triton.jit
def _query_step(
    q, gradient, k, v, acc, slope_sum, query_pos, key_pos, row_lse, row_delta, scoring, dropout, first_key, keep_factor,
    ALIBI_SQRT: tl.constexpr, NUM_RANGES: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys' share to the gradient of a tile of query rows, and to that of their slope."""
    products = row_products(q, k, EXACT)
    weights = tile_weights(products, query_pos, key_pos, row_lse, scoring, ALIBI_SQRT, NUM_RANGES, MASKED, EXACT, False)
    d_weights = row_products(gradient, v, EXACT)
    if dropout is not None:
        d_weights = kept_weights(d_weights * keep_factor, first_key, dropout)
    d_scores = weights * (d_weights - row_delta[:, None])
    if scoring.slopes is not None:
        slope_sum += tl.sum(d_scores * alibi_distance(query_pos[:, None], key_pos[None, :], ALIBI_SQRT), 1)
    d_scores = score_slope(d_scores, products, scoring)
    return add_product(d_scores.to(k.dtype), k, acc, EXACT), slope_sum


@triton.jit
def _key_step(
    query, d_out, delta, row_lse, k, v, acc_key, acc_value, head, position, columns, inside, context, key_pos,
    num_tokens, num_keys, alibi_slopes, scale, soft_cap, bounds, ranges, dropout_seeds, dropout_limit, keep_factor,
    first_key, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    QUERY_STRIDES: tl.constexpr, D_OUT_STRIDES: tl.constexpr, DROPOUT_SEEDS_STRIDES: tl.constexpr,
    ALIBI_SQRT: tl.constexpr, NUM_RANGES: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds the share of a tile of query rows of one head to the gradients of a tile of keys and values."""
    q = load_rows(
        query + head * QUERY_STRIDES[1], position, columns, inside, QUERY_STRIDES[0], HEAD_SIZE, HEAD_PADDED, MASKED
    )
    gradient = load_rows(
        d_out + head * D_OUT_STRIDES[1], position, columns, inside, D_OUT_STRIDES[0], VALUE_SIZE, VALUE_PADDED, MASKED
    ).to(k.dtype)
    place = head.to(tl.int64) * num_tokens + position + columns
    if MASKED:
        # A weight of 0 for the rows of other sequences.
        logsum = tl.load(row_lse + place, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + place, mask=inside, other=0.0)
    else:
        logsum = tl.load(row_lse + place)
        row_delta = tl.load(delta + place)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head).to(tl.float32)
    scoring = Scoring(scale, soft_cap, slopes, None, None, None, None, context, bounds, ranges, num_keys)
    products = row_products(k, q, EXACT)
    # Both before the exponentials: 2 to 11% faster here, and slower in the queries' kernel.
    d_weights = row_products(v, gradient, EXACT)
    query_pos = context + position + columns
    weights = tile_weights(products, query_pos, key_pos, logsum, scoring, ALIBI_SQRT, NUM_RANGES, MASKED, EXACT, True)
    kept = weights
    if dropout_seeds is not None:
        dropout = dropout_of(dropout_seeds, 0, head, dropout_limit, position, DROPOUT_SEEDS_STRIDES)
        kept = kept_weights(weights, first_key, dropout, TRANSPOSED=True)
        d_weights = tl.where(kept > 0, d_weights * keep_factor, 0.0)
    acc_value = add_product(kept.to(k.dtype), gradient, acc_value, EXACT)
    d_scores = score_slope(weights * (d_weights - row_delta[None, :]), products, scoring)
    if MASKED:
        # A key that no row sees may hold NaN.
        d_scores = tl.where(weights > 0, d_scores, 0.0)
    return add_product(d_scores.to(k.dtype), q, acc_key, EXACT), acc_value


@triton.jit
def _store_gradient(
    array, acc, scale, packed, head, live, SIZE: tl.constexpr, STRIDES: tl.constexpr, NEGATE: tl.constexpr
):
    """Stores rows of a gradient, times the attention scale with its sign."""
    if NEGATE:
        scale = -scale
    dims = tl.arange(0, acc.shape[1])
    rows = array + packed.to(tl.int64) * STRIDES[0] + head * STRIDES[1]
    mask = live[:, None] & (dims < SIZE)[None, :]
    tl.store(rows[:, None] + dims[None, :], (acc * scale).to(array.dtype.element_ty), mask=mask)
