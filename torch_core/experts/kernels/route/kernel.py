"""The router: logits in parts of the hidden size, then the choice among their sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def router_logits_kernel(
    x,
    kernel,
    parts,
    num_tokens,
    x_stride,
    kernel_row_stride,
    IN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (tiles of tokens, tiles of experts, parts of PART elements of a row). `parts` is [parts, tokens, experts].

    One row is multiplied without matrix units: it waits for the kernel's bytes alone.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    is_token, is_expert = tokens < num_tokens, experts < NUM_EXPERTS
    steps = tl.arange(0, BLOCK_K)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride + steps[None, :]
    weights = kernel + steps[:, None].to(tl.int64) * kernel_row_stride + experts[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, PART, BLOCK_K):
        first = part * PART + start
        inside = (first + steps < IN) & (start + steps < PART)
        right = tl.load(weights + first * kernel_row_stride, mask=inside[:, None] & is_expert[None, :], other=0.0)
        if BLOCK_T == 1:
            left = tl.load(x + first + steps, mask=inside, other=0.0)
            total += tl.sum(left.to(tl.float32)[:, None] * right.to(tl.float32), 0)[None, :]
        else:
            left = tl.load(rows + first, mask=is_token[:, None] & inside[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    target = parts + (part * num_tokens + tokens).to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
    tl.store(target, total, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def select_experts_kernel(
    parts,
    bias,
    correction_bias,
    topk_weights,
    topk_ids,
    num_tokens,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORM: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """Grid: (tiles of tokens,). Lanes are BLOCK_G groups of BLOCK_S, of which GROUPS and a group's experts are real."""
    SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
    LANES: tl.constexpr = BLOCK_G * BLOCK_S
    # Below the key of every score.
    NONE: tl.constexpr = -(2**63)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    lanes = tl.arange(0, LANES)
    experts = lanes // BLOCK_S * SIZE + lanes % BLOCK_S
    is_expert = (lanes < GROUPS * BLOCK_S) & (lanes % BLOCK_S < SIZE)
    mask = is_token[:, None] & is_expert[None, :]
    logits = tl.zeros([BLOCK_T, LANES], tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + tokens).to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
        logits += tl.load(parts + place, mask=mask, other=0.0)
    if bias is not None:
        logits += tl.load(bias + experts, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    if SOFTMAX:
        logits = tl.where(is_expert[None, :], logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    else:
        scores = tl.sigmoid(logits)
    choice = scores
    if correction_bias is not None:
        choice += tl.load(correction_bias + experts, mask=is_expert, other=0.0)[None, :]
    keys = tl.where(is_expert[None, :], _key(choice, (LANES - 1 - lanes)[None, :]), NONE)
    if GROUPS > 1:
        grouped = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
        best = tl.max(grouped, 2)
        value = _score(best)
        if correction_bias is not None:
            value += _score(tl.max(tl.where(grouped == best[:, :, None], NONE, grouped), 2))
        groups = tl.arange(0, BLOCK_G)
        group_keys = tl.where((groups < GROUPS)[None, :], _key(value, (BLOCK_G - 1 - groups)[None, :]), NONE)
        kept = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
        for _ in tl.static_range(TOPK_GROUP):
            hit = group_keys == tl.max(group_keys, 1)[:, None]
            kept += hit.to(tl.int32)
            group_keys = tl.where(hit, NONE, group_keys)
        keys = tl.reshape(tl.where((kept > 0)[:, :, None], grouped, NONE), [BLOCK_T, LANES])
    slots = tl.arange(0, BLOCK_TOP)
    weights = tl.zeros([BLOCK_T, BLOCK_TOP], tl.float32)
    ids = tl.zeros([BLOCK_T, BLOCK_TOP], tl.int32)
    for k in tl.static_range(TOP_K):
        top = tl.max(keys, 1)
        hit = keys == top[:, None]
        keys = tl.where(hit, NONE, keys)
        weight = _score(top)
        if correction_bias is not None:
            weight = tl.sum(tl.where(hit, scores, 0.0), 1)
        lane = LANES - 1 - top.to(tl.int32)
        own = (slots == k)[None, :]
        ids = tl.where(own, (lane // BLOCK_S * SIZE + lane % BLOCK_S)[:, None], ids)
        weights = tl.where(own, weight[:, None], weights)
    if NORM:
        # The sigmoids of a row may all be 0.
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    place = tokens.to(tl.int64)[:, None] * TOP_K + slots[None, :]
    stored = is_token[:, None] & (slots < TOP_K)[None, :]
    tl.store(topk_weights + place, weights * scaling, mask=stored)
    tl.store(topk_ids + place, ids, mask=stored)


@triton.jit
def _key(scores, places):
    """Returns int64 keys in the order of scores, those of higher places first among equals."""
    bits = scores.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | places.to(tl.int64)


@triton.jit
def _score(keys):
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
