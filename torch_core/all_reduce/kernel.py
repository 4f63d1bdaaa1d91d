"""Kernels that sum, norm, exchange or merge small arrays of devices without waiting for the host; `words` says how.

A block writes its words to every other device's workspace, and waits for the same block of the others alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.all_reduce.words import (
    add_shares,
    add_words,
    await_words,
    is_none,
    join_words,
    slots_at,
    split_words,
)


@triton.jit
def all_reduce_kernel(
    x,
    peers,
    out,
    num_words,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
):
    """Writes the sum over WORLD devices of BLOCK 32-bit words of x, added in float32 in the order of ranks."""
    own, calls, call, index, mask, place = _begin(peers, num_words, WORLD, BLOCK, MAX_BLOCKS, REGION)
    dtype: tl.constexpr = out.dtype.element_ty
    word = tl.load(x.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    low, high = add_words(word, peers, own, place, mask, call, dtype, WORLD, MAX_BLOCKS, MAX_POLLS, REGION)
    tl.store(out.to(tl.pointer_type(tl.int32)) + index, join_words(low, high, dtype), mask=mask)
    tl.store(calls, call)


@triton.jit
def all_reduce_shares_kernel(
    x,
    peers,
    out,
    num_words,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
):
    """Writes what `all_reduce_kernel` does, of WORLD times SHARE words, in two shots (`words.add_shares`)."""
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    index = program * (WORLD * SHARE) + column
    sums = add_shares(
        x, index, num_words, peers, own, own - MAX_BLOCKS + program * BLOCKS, program * (BLOCKS * BLOCK) + column,
        out.dtype.element_ty, WORLD, BLOCK, BLOCKS, SHARE, COLUMNS, MAX_BLOCKS, MAX_POLLS, REGION,
    )  # fmt: skip
    for peer in tl.static_range(WORLD):
        share = index + peer * SHARE
        tl.store(out.to(tl.pointer_type(tl.int32)) + share, sums[peer], mask=(column < SHARE) & (share < num_words))


@triton.jit
def exchange_kernel(
    x,
    peers,
    out,
    num_words,
    part_stride,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
):
    """Writes part [rank] of every device's x, one behind the other in rank order; with part_stride 0 x is one part."""
    own, calls, call, index, mask, place = _begin(peers, num_words, WORLD, BLOCK, MAX_BLOCKS, REGION)
    rank = tl.load(peers)
    pairs: tl.constexpr = tl.pointer_type(tl.int64)
    for peer in tl.static_range(WORLD):
        word = tl.load(x + peer * part_stride + index, mask=mask, other=0)
        slot = slots_at(peers + 4 + 2 * peer, MAX_BLOCKS, REGION).to(pairs) + rank * (MAX_BLOCKS * BLOCK)
        tl.store(slot + place, (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32), mask=mask)
    found = await_words(own.to(pairs), place, mask, -1, call, WORLD, MAX_BLOCKS * BLOCK, MAX_POLLS)
    for peer in tl.static_range(WORLD):
        word = tl.where(is_none(found[peer], call), -1, found[peer].to(tl.int32))
        tl.store(out + peer * num_words + index, word, mask=mask)
    tl.store(calls, call)


@triton.jit
def all_reduce_norm_kernel(
    x,
    residual,
    weight,
    peers,
    out,
    normed,
    num_words,
    epsilon,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ADD_ONE: tl.constexpr,
):
    """Writes a row of residual + the sum of x over WORLD devices, and its root mean square norm.

    Behind each of its two sums a decoder layer adds to the residual stream and takes the root mean square of its rows:
    two launches more, of which each costs a small step about as much as the sum (as in TensorRT-LLM's and FlashInfer's
    fused all-reduce). A program has a whole row, and with it as many of the region's blocks as the row needs; each
    counts its calls alone, so that these sums and `all_reduce_kernel`'s, of rows of any width, follow each other.

    A row has `num_words` 32-bit words in ROW_BLOCKS blocks, of which a power of two is ALL_BLOCKS. With ROUND_FIRST the
    norm rounds before the weight too; with ADD_ONE the stored weight is the factor minus 1.
    """
    words: tl.constexpr = tl.pointer_type(tl.int32)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0)
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    block = tl.arange(0, ALL_BLOCKS)
    calls = own - MAX_BLOCKS + row * ROW_BLOCKS + block
    call = tl.load(calls, mask=block < ROW_BLOCKS, other=0) + 1
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = column < num_words
    index = row * num_words + column
    place = ((call & 1) * (WORLD * MAX_BLOCKS * BLOCK))[:, None] + row * (ROW_BLOCKS * BLOCK) + column

    word = tl.load(x.to(words) + index, mask=mask, other=0)
    before = tl.load(residual.to(words) + index, mask=mask, other=0)
    scale = tl.load(weight.to(words) + column, mask=mask, other=0)
    low, high = add_words(word, peers, own, place, mask, call[:, None], dtype, WORLD, MAX_BLOCKS, MAX_POLLS, REGION)
    before_low, before_high = split_words(before, dtype)
    # Rounded twice, as the sum alone and the addition behind it are.
    total = join_words(low.to(dtype).to(tl.float32) + before_low, high.to(dtype).to(tl.float32) + before_high, dtype)
    tl.store(out.to(words) + index, total, mask=mask)

    low, high = split_words(total, dtype)
    squares = tl.sum(tl.where(mask, low * low + high * high, 0.0))
    inverse = tl.math.rsqrt(squares / (2 * num_words) + epsilon)
    tl.store(normed.to(words) + index, _normed(total, scale, inverse, dtype, ROUND_FIRST, ADD_ONE), mask=mask)
    tl.store(calls, call, mask=block < ROW_BLOCKS)


@triton.jit
def all_reduce_norm_shares_kernel(
    x,
    residual,
    weight,
    peers,
    out,
    normed,
    num_words,
    epsilon,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ADD_ONE: tl.constexpr,
):
    """Writes what `all_reduce_norm_kernel` does, of a row of at most WORLD times SHARE words, in two shots.

    Only sums go, since every device adds and normalises whole rows in less time than their results would take.
    """
    words: tl.constexpr = tl.pointer_type(tl.int32)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    start = row * num_words
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    before = ()
    scales = ()
    for peer in tl.static_range(WORLD):
        share = peer * SHARE + column
        mask = (column < SHARE) & (share < num_words)
        word = tl.load(residual.to(words) + start + share, mask=mask, other=0)
        before = before + (word,)  # noqa: RUF005 - Triton has no starred tuples.
        scales = scales + (tl.load(weight.to(words) + share, mask=mask, other=0),)  # noqa: RUF005
    sums = add_shares(
        x, start + column, start + num_words, peers, own, own - MAX_BLOCKS + row * BLOCKS,
        row * (BLOCKS * BLOCK) + column, dtype, WORLD, BLOCK, BLOCKS, SHARE, COLUMNS, MAX_BLOCKS, MAX_POLLS, REGION,
    )  # fmt: skip
    totals = ()
    squares = tl.zeros(column.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        share = peer * SHARE + column
        mask = (column < SHARE) & (share < num_words)
        low, high = split_words(sums[peer], dtype)
        before_low, before_high = split_words(before[peer], dtype)
        # The sum has been rounded.
        total = join_words(low + before_low, high + before_high, dtype)
        tl.store(out.to(words) + start + share, total, mask=mask)
        low, high = split_words(total, dtype)
        squares += tl.where(mask, low * low + high * high, 0.0)
        totals = totals + (total,)  # noqa: RUF005

    inverse = tl.math.rsqrt(tl.sum(squares) / (2 * num_words) + epsilon)
    for peer in tl.static_range(WORLD):
        share = peer * SHARE + column
        mask = (column < SHARE) & (share < num_words)
        word = _normed(totals[peer], scales[peer], inverse, dtype, ROUND_FIRST, ADD_ONE)
        tl.store(normed.to(words) + start + share, word, mask=mask)


@triton.jit
def merge_over_devices_kernel(
    x,
    x_lse,
    sinks,
    peers,
    out,
    lse,
    num_heads,
    token_rows,
    rank_rows,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    ALL_WORDS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
    REGION: tl.constexpr,
):
    """Writes a row of attention to the keys of all devices from that to the keys of each, `x` and its log-sum-exp.

    A program has the row of one head of a token, in one block of the exchanges' region: its NUM_WORDS words, then its
    log-sum-exp. The result has `num_heads` heads; row [token, head] of it is row `token * token_rows + head` of x of
    every device, or, with heads that are split, that row and `rank * rank_rows` more.
    """
    words: tl.constexpr = tl.pointer_type(tl.int32)
    pairs: tl.constexpr = tl.pointer_type(tl.int64)
    SLOT: tl.constexpr = MAX_BLOCKS * BLOCK
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    head = row % num_heads
    source = row // num_heads * token_rows + head
    rank = tl.load(peers)
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    calls = own - MAX_BLOCKS + row
    call = tl.load(calls) + 1
    column = tl.arange(0, ALL_WORDS)[None, :]
    mask = column <= NUM_WORDS
    place = (call & 1) * (WORLD * SLOT) + row * BLOCK + column
    for peer in tl.static_range(WORLD):
        word = _words_and_lse(x, x_lse, source + peer * rank_rows, column, NUM_WORDS)
        slot = slots_at(peers + 4 + 2 * peer, MAX_BLOCKS, REGION).to(pairs) + rank * SLOT
        pair = (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
        tl.store(tl.multiple_of(slot + place, [1, 16]), pair, mask=mask & (rank != peer))
    kept = _words_and_lse(x, x_lse, source + rank * rank_rows, column, NUM_WORDS)

    found = await_words(own.to(pairs), place, mask, rank, call, WORLD, SLOT, MAX_POLLS)
    parts = ()
    lses = ()
    top = float("-inf")
    for peer in tl.static_range(WORLD):
        word = tl.where(is_none(found[peer], call), -1, found[peer].to(tl.int32))
        word = tl.where(rank == peer, kept, word)
        part = tl.sum(tl.where(column == NUM_WORDS, word, 0)).to(tl.float32, bitcast=True)
        parts = parts + (word,)  # noqa: RUF005 - Triton has no starred tuples.
        lses = lses + (part,)  # noqa: RUF005
        top = tl.maximum(top, part, propagate_nan=tl.PropagateNan.ALL)
    empty = top == float("-inf")
    total = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.where(empty, 0.0, tl.maximum(top, sink))
        total = tl.exp(sink - top)
    else:
        top = tl.where(empty, 0.0, top)
    for peer in tl.static_range(WORLD):
        total += tl.exp(lses[peer] - top)
    total = tl.where(empty, 1.0, total)
    low = tl.zeros(column.shape, tl.float32)
    high = tl.zeros(column.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        part_low, part_high = split_words(parts[peer], dtype)
        weight = tl.div_rn(tl.exp(lses[peer] - top), total)
        # A part that saw nothing may hold anything: zero times NaN is NaN.
        low += tl.where(weight > 0.0, part_low, 0.0) * weight
        high += tl.where(weight > 0.0, part_high, 0.0) * weight
    columns = column < NUM_WORDS
    if out.dtype.element_ty == dtype:
        tl.store(out.to(words) + row * NUM_WORDS + column, join_words(low, high, dtype), mask=columns)
    else:
        tl.store(out + 2 * (row * NUM_WORDS + column), low, mask=columns)
        tl.store(out + 2 * (row * NUM_WORDS + column) + 1, high, mask=columns)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + tl.log(total)))
    tl.store(calls, call)


@triton.jit
def _begin(peers, num_words, WORLD: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, REGION: tl.constexpr):
    """Returns (own slots, where the block counts its calls, number of this one, the block's words, [1, BLOCK], which of
    them there are, their places behind the start of a rank's slots)."""
    block = tl.program_id(0)
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    calls = own - MAX_BLOCKS + block
    call = tl.load(calls) + 1
    index = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    return own, calls, call, index, index < num_words, (call & 1) * (WORLD * MAX_BLOCKS * BLOCK) + index


@triton.jit
def _words_and_lse(x, x_lse, row, column, NUM_WORDS: tl.constexpr):
    """Returns the words of a row of x, and behind them its log-sum-exp's."""
    words: tl.constexpr = tl.pointer_type(tl.int32)
    word = tl.load(x.to(words) + row * NUM_WORDS + column, mask=column < NUM_WORDS, other=0)
    return tl.where(column == NUM_WORDS, tl.load(x_lse.to(words) + row), word)


@triton.jit
def _normed(total, scale, inverse, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, ADD_ONE: tl.constexpr):
    """Returns words of a row times the inverse of its root mean square and the weight's words."""
    low, high = split_words(total, dtype)
    scale_low, scale_high = split_words(scale, dtype)
    low = _weighted(low * inverse, scale_low, dtype, ROUND_FIRST, ADD_ONE)
    high = _weighted(high * inverse, scale_high, dtype, ROUND_FIRST, ADD_ONE)
    return join_words(low, high, dtype)


@triton.jit
def _weighted(x, weight, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, ADD_ONE: tl.constexpr):
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32)
    return x * (weight + 1.0 if ADD_ONE else weight)
