"""A sum over devices, its addition to a residual, and the norm of the result, in one launch.

Behind each of its two sums a decoder layer adds to the residual stream and takes the root mean square of its rows: two
launches more, of which each costs a small step about as much as the sum (as in TensorRT-LLM's and FlashInfer's fused
all-reduce). A program has a whole row, and with it as many of the region's blocks as the row needs; each counts its
calls alone, so that these sums and `all_reduce_kernel`'s, of rows of any width, follow each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.all_reduce.words import add_words, join_words, slots_at, split_words


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
    scale_low, scale_high = split_words(tl.load(weight.to(words) + column, mask=mask, other=0), dtype)
    low, high = add_words(word, peers, own, place, mask, call[:, None], dtype, WORLD, MAX_BLOCKS, MAX_POLLS, REGION)
    before_low, before_high = split_words(before, dtype)
    # Rounded twice, as the sum alone and the addition behind it are.
    total = join_words(low.to(dtype).to(tl.float32) + before_low, high.to(dtype).to(tl.float32) + before_high, dtype)
    tl.store(out.to(words) + index, total, mask=mask)

    low, high = split_words(total, dtype)
    squares = tl.sum(tl.where(mask, low * low + high * high, 0.0))
    inverse = tl.math.rsqrt(squares / (2 * num_words) + epsilon)
    low = _weighted(low * inverse, scale_low, dtype, ROUND_FIRST, ADD_ONE)
    high = _weighted(high * inverse, scale_high, dtype, ROUND_FIRST, ADD_ONE)
    tl.store(normed.to(words) + index, join_words(low, high, dtype), mask=mask)
    tl.store(calls, call, mask=block < ROW_BLOCKS)


@triton.jit
def _weighted(x, weight, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, ADD_ONE: tl.constexpr):
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32)
    return x * (weight + 1.0 if ADD_ONE else weight)
