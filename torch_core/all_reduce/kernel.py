"""Kernels that sum or exchange small arrays between devices without waiting for the host; `words` says how.

A block writes its words to every other device's workspace, and waits for the same block of the others alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.all_reduce.words import add_words, await_words, is_none, join_words, slots_at


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
def _begin(peers, num_words, WORLD: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, REGION: tl.constexpr):
    """Returns (own slots, where the block counts its calls, number of this one, the block's words, [1, BLOCK], which of
    them there are, their places behind the start of a rank's slots)."""
    block = tl.program_id(0)
    own = slots_at(peers + 2, MAX_BLOCKS, REGION)
    calls = own - MAX_BLOCKS + block
    call = tl.load(calls) + 1
    index = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    return own, calls, call, index, index < num_words, (call & 1) * (WORLD * MAX_BLOCKS * BLOCK) + index
