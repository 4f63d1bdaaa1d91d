"""The keys that a query row sees, and the changes of a score before the softmax; shared by every attention kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class Bounds(NamedTuple):
    """The distances at which a position sees keys; None where there is no bound."""

    window_left: Any  # Keys before the position.
    window_right: Any  # Keys after the position.
    attention_chunk: Any  # Size of the chunks; a position sees only keys of its own chunk.


class Scoring(NamedTuple):
    """The operations on the products of a tile of rows and on their scores; None for an operation that is off."""

    scale: Any  # The attention scale with per-tensor scales of query and key folded in.
    soft_cap: Any  # The soft cap.
    slopes: Any  # ALiBi slope of each row.
    relative_bias: Any  # For each row a pointer to its head's biases by distance.
    relative_bias_size: Any  # Number of biases of a head, for the distances from -D to D.
    # Bias [qq_bias_size, qq_bias_size] on the scores between the sequence's own new tokens (tree attention).
    qq_bias: Any
    qq_bias_size: Any  # Rows and columns of qq_bias.
    context: Any  # Tokens of the sequence before its first query.
    bounds: Any  # Which keys a row sees.
    ranges: Any  # Pointer to the sequence's pairs of positions that see each other.
    num_keys: Any  # Keys of the sequence.


@triton.jit
def visible_keys(first_pos, last_pos, num_keys, bounds, NUM_RANGES: tl.constexpr):
    """The range [low, high) that holds every key visible to any of the positions first_pos..last_pos."""
    low = num_keys * 0
    high = num_keys
    if NUM_RANGES == 0:
        low, high = _bounded(first_pos, last_pos, low, high, bounds.window_left, bounds.window_right, bounds)
    return low, tl.maximum(high, low)


@triton.jit
def fully_visible_keys(first_pos, last_pos, num_keys, bounds):
    """The range [low, high) of keys visible to all the positions first_pos..last_pos; empty when high <= low."""
    low, high = _bounded(last_pos, first_pos, num_keys * 0, num_keys, bounds.window_left, bounds.window_right, bounds)
    if bounds.attention_chunk is not None:
        high = tl.where(first_pos < 0, 0, high)
    return low, high


@triton.jit
def visible_queries(first_key, last_key, first_pos, end_pos, bounds, NUM_RANGES: tl.constexpr):
    """The range [low, high) of positions within [first_pos, end_pos) that see any of the keys first_key..last_key."""
    low = first_pos
    high = end_pos
    if NUM_RANGES == 0:
        low, high = _bounded(first_key, last_key, low, high, bounds.window_right, bounds.window_left, bounds)
    return low, tl.maximum(high, low)


@triton.jit
def fully_visible_queries(first_key, last_key, first_pos, end_pos, bounds):
    """The range [low, high) of those that see all of the keys first_key..last_key; empty when high <= low."""
    return _bounded(last_key, first_key, first_pos, end_pos, bounds.window_right, bounds.window_left, bounds)


@triton.jit
def _bounded(first, last, low, high, before, after, bounds):
    """Cuts [low, high) to `before` places below `first`, `after` above `last`, and their chunks of attention."""
    if before is not None:
        low = tl.maximum(low, first - before)
    if after is not None:
        high = tl.minimum(high, last + after + 1)
    if bounds.attention_chunk is not None:
        chunk = bounds.attention_chunk
        low = tl.maximum(low, tl.maximum(first, 0) // chunk * chunk)
        high = tl.minimum(high, (tl.maximum(last, 0) // chunk + 1) * chunk)
    return low, high


@triton.jit
def tile_borders(low, high, full_low, full_high, BLOCK: tl.constexpr, NUM_RANGES: tl.constexpr):
    """Cuts a range into tiles: edges [start, body_start) and [body_end, end), and a body that needs no mask.

    [low, high) is visible at all, [full_low, full_high) throughout; with NUM_RANGES pairs of positions that see each
    other there is no body. Returns (start, body_start, body_end, end), multiples of BLOCK.
    """
    start = low // BLOCK * BLOCK
    end = (high + BLOCK - 1) // BLOCK * BLOCK
    body_start = tl.minimum(tl.maximum((full_low + BLOCK - 1) // BLOCK * BLOCK, start), end)
    body_end = tl.maximum(full_high // BLOCK * BLOCK, body_start)
    if NUM_RANGES > 0:
        body_start = start
        body_end = start
    # Known to the compiler, multiples of the tile let it find the keys that share a block without arithmetic.
    return start, tl.multiple_of(body_start, BLOCK), tl.multiple_of(body_end, BLOCK), end


@triton.jit
def _visible(query_pos, key_pos, scoring, NUM_RANGES: tl.constexpr):
    """The mask of torch_core.base.specs.AttentionSpec on query_pos [rows, 1] and key_pos [1, keys].

    `scoring.ranges` points to NUM_RANGES pairs (first, last position, both included) of this sequence; a query inside a
    pair sees every key inside it, even outside the other bounds (vLLM: mm_prefix_range). A pair with last <= first is
    empty.
    """
    bounds = scoring.bounds
    mask = (key_pos < scoring.num_keys) & (query_pos == query_pos)
    if bounds.window_right is not None:
        mask = mask & (key_pos <= query_pos + bounds.window_right)
    if bounds.window_left is not None:
        mask = mask & (key_pos >= query_pos - bounds.window_left)
    if bounds.attention_chunk is not None:
        chunk = bounds.attention_chunk
        mask = mask & (key_pos // chunk == query_pos // chunk) & (query_pos >= 0)
    for i in tl.static_range(NUM_RANGES):
        first = tl.load(scoring.ranges + 2 * i)
        last = tl.load(scoring.ranges + 2 * i + 1)
        rows = (query_pos >= first) & (query_pos <= last) & (first < last)
        mask = mask | (rows & (key_pos >= first) & (key_pos <= last) & (key_pos < scoring.num_keys))
    return mask


@triton.jit
def soft_capped(scores, cap):
    """cap * tanh(scores / cap), without overflow and with a small relative error near 0."""
    x = scores / cap
    square = x * x
    # 1 - 2 / (1 + e^2x) loses digits near 0, where four terms of the series are exact to fp32.
    near = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
    return cap * tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def alibi_distance(rows, keys, ALIBI_SQRT: tl.constexpr):
    """The factor of an ALiBi slope."""
    distance = (keys - rows).to(tl.float32)
    if ALIBI_SQRT:
        distance = -tl.sqrt(tl.maximum(-distance, 0.0))
    return distance


@triton.jit
def tile_scores(
    products, query_pos, key_pos, key_scales, scoring, ALIBI_SQRT: tl.constexpr, NUM_RANGES: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Turns unscaled query-key products [rows, keys] into (softmax scores, factor); scores are -inf where masked.

    The softmax exponent in units of log 2 is scores * factor. Without other transformations the factor carries the
    scale, so that scaling costs no instruction of its own. With EXACT the scores are in natural units and the factor is
    1, see softmax.softmax_step. Positions are those in the sequence; `key_scales` are the scales of the keys' rows, or
    None. With ALIBI_SQRT ALiBi is -slope * sqrt(distance). Without MASKED every row is known to see every key of the
    tile. With TRANSPOSED products are [keys, rows], and `scoring.slopes` is one number.
    """
    if TRANSPOSED:
        rows = query_pos[None, :]
        keys = key_pos[:, None]
    else:
        rows = query_pos[:, None]
        keys = key_pos[None, :]
    slopes = scoring.slopes
    relative_bias = scoring.relative_bias
    qq_bias = scoring.qq_bias
    UNBIASED: tl.constexpr = slopes is None and relative_bias is None and qq_bias is None
    if key_scales is None and scoring.soft_cap is None and UNBIASED and not EXACT:
        scores = products
        factor = scoring.scale * LOG2E
    else:
        scores = products * scoring.scale
        if key_scales is not None:
            scores = scores * key_scales[None, :]
        if scoring.soft_cap is not None:
            scores = soft_capped(scores, scoring.soft_cap)
        if slopes is not None:
            distance = alibi_distance(rows, keys, ALIBI_SQRT)
            if TRANSPOSED:
                scores += slopes * distance
            else:
                scores += slopes[:, None] * distance
        if relative_bias is not None:
            furthest = scoring.relative_bias_size // 2
            entry = tl.minimum(tl.maximum(keys - rows, -furthest), furthest) + furthest
            scores += tl.load(relative_bias[:, None] + entry).to(tl.float32)
        if qq_bias is not None:
            row = rows - scoring.context
            column = keys - scoring.context
            size = scoring.qq_bias_size
            inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
            scores += tl.load(qq_bias + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if not EXACT:
            scores = scores * LOG2E
        factor = 1.0
    if MASKED:
        scores = tl.where(_visible(rows, keys, scoring, NUM_RANGES), scores, float("-inf"))
    return scores, factor
