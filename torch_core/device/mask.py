"""Which keys a query row sees, and what is done to a score before the softmax; shared by every attention kernel.

Bounds that a call does not have are None: window_left, window_right, attention_chunk and soft_cap are then constexprs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2E", "fully_visible_keys", "tile_scores", "visible_keys"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_keys(first_pos, last_pos, num_keys, window_left, window_right, attention_chunk, NUM_RANGES: tl.constexpr):
    """The range [low, high) that holds every key visible to any of the positions first_pos..last_pos."""
    low = num_keys * 0
    high = num_keys
    if NUM_RANGES == 0:
        if window_left is not None:
            low = tl.maximum(low, first_pos - window_left)
        if window_right is not None:
            high = tl.minimum(high, last_pos + window_right + 1)
        if attention_chunk is not None:
            low = tl.maximum(low, tl.maximum(first_pos, 0) // attention_chunk * attention_chunk)
            high = tl.minimum(high, (tl.maximum(last_pos, 0) // attention_chunk + 1) * attention_chunk)
    return low, tl.maximum(high, low)


@triton.jit
def fully_visible_keys(first_pos, last_pos, num_keys, window_left, window_right, attention_chunk):
    """The range [low, high) of keys visible to all the positions first_pos..last_pos; empty when high <= low."""
    low = num_keys * 0
    high = num_keys
    if window_left is not None:
        low = tl.maximum(low, last_pos - window_left)
    if window_right is not None:
        high = tl.minimum(high, first_pos + window_right + 1)
    if attention_chunk is not None:
        low = tl.maximum(low, tl.maximum(last_pos, 0) // attention_chunk * attention_chunk)
        high = tl.where(first_pos < 0, 0, tl.minimum(high, (first_pos // attention_chunk + 1) * attention_chunk))
    return low, high


@triton.jit
def _visible(
    query_pos, key_pos, num_keys, window_left, window_right, attention_chunk, ranges, NUM_RANGES: tl.constexpr
):
    """The mask of torch_core.specs.AttentionSpec on query_pos [rows, 1] and key_pos [1, keys].

    `ranges` points to NUM_RANGES pairs (first, last position, both included) of this sequence; a query inside a pair
    sees every key inside it, whatever the other bounds say (vLLM: mm_prefix_range). A pair with last <= first is empty.
    """
    mask = (key_pos < num_keys) & (query_pos == query_pos)
    if window_right is not None:
        mask = mask & (key_pos <= query_pos + window_right)
    if window_left is not None:
        mask = mask & (key_pos >= query_pos - window_left)
    if attention_chunk is not None:
        mask = mask & (key_pos // attention_chunk == query_pos // attention_chunk) & (query_pos >= 0)
    for i in tl.static_range(NUM_RANGES):
        first = tl.load(ranges + 2 * i)
        last = tl.load(ranges + 2 * i + 1)
        rows = (query_pos >= first) & (query_pos <= last) & (first < last)
        mask = mask | (rows & (key_pos >= first) & (key_pos <= last) & (key_pos < num_keys))
    return mask


@triton.jit
def _soft_capped(scores, cap):
    """cap * tanh(scores / cap), without overflow and with a small relative error near 0."""
    x = scores / cap
    square = x * x
    # 1 - 2 / (1 + e^2x) loses digits near 0, where four terms of the series are exact to fp32.
    near = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E)))
    return cap * tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def tile_scores(
    products,
    query_pos,
    key_pos,
    num_keys,
    scale,
    key_scales,
    soft_cap,
    slopes,
    qq_bias,
    qq_bias_size,
    context,
    window_left,
    window_right,
    attention_chunk,
    ranges,
    ALIBI_SQRT: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Turns query-key products [rows, keys] into softmax scores, -inf where masked.

    Args:
        products: query @ key, unscaled.
        query_pos: positions of the rows in their sequence.
        key_pos: positions of the keys.
        num_keys: keys of the sequence.
        scale: the attention scale with per-tensor scales of query and key folded in.
        key_scales: scale of each key's row, or None.
        soft_cap: the soft cap, or None.
        slopes: ALiBi slope of each row, or None.
        qq_bias: bias [qq_bias_size, qq_bias_size] on the scores between the sequence's own new tokens (tree
            attention), or None.
        context: tokens of the sequence before its first query.
        window_left, window_right, attention_chunk: bounds, or None.
        ranges: pairs of bidirectional positions.
        ALIBI_SQRT: ALiBi is -slope * sqrt(distance).
        NUM_RANGES: number of pairs.
        MASKED: False when every row is known to see every key of the tile.
        EXACT: see attention_softmax.softmax_step.

    Returns:
        (scores, factor): the softmax exponent in units of log 2 is scores * factor. Without other transformations the
        factor carries the scale, so that scaling costs no instruction of its own. With EXACT the scores are in
        natural units and the factor is 1.
    """
    rows = query_pos[:, None]
    keys = key_pos[None, :]
    if key_scales is None and soft_cap is None and slopes is None and qq_bias is None and not EXACT:
        scores = products
        factor = scale * LOG2E
    else:
        scores = products * scale
        if key_scales is not None:
            scores = scores * key_scales[None, :]
        if soft_cap is not None:
            scores = _soft_capped(scores, soft_cap)
        if slopes is not None:
            distance = (keys - rows).to(tl.float32)
            if ALIBI_SQRT:
                distance = -tl.sqrt(tl.maximum(-distance, 0.0))
            scores += slopes[:, None] * distance
        if qq_bias is not None:
            row = rows - context
            column = keys - context
            inside = (row >= 0) & (row < qq_bias_size) & (column >= 0) & (column < qq_bias_size)
            scores += tl.load(qq_bias + row * qq_bias_size + column, mask=inside, other=0.0).to(tl.float32)
        if not EXACT:
            scores = scores * LOG2E
        factor = 1.0
    if MASKED:
        mask = _visible(rows, keys, num_keys, window_left, window_right, attention_chunk, ranges, NUM_RANGES)
        scores = tl.where(mask, scores, float("-inf"))
    return scores, factor
