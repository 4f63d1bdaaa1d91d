"""Kernels of devices that see each other's memory: they sum or exchange small arrays without waiting for the host.

A block writes its words to every other device's workspace, and waits for the same block of the others alone. Nothing
is fenced and no flag is sent apart: a word tells by itself that it has come (one shot, as in vLLM's
csrc/custom_all_reduce.cuh). What is exchanged goes beside the number of the call, in 64 bits that are written whole
(the LL protocol of NCCL, arXiv:2507.04786). What is summed goes alone, inverted, since zero stands for no word: floats
have a bit pattern to spare, and half the bytes move (TensorRT-LLM's one-shot sums spare -0.0, and call it Lamport). Who
has read such words puts zeros in their place.

Two slots in turn are enough: who has a peer's words of this call knows that the peer's last call, and so its reading of
the other slot, is over. What has not come after MAX_POLLS looks is NaN, and the launch an error.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["all_reduce_kernel", "exchange_kernel", "stop_with_an_error"]


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
    block = tl.program_id(0)
    rank = tl.load(peers)
    own = _region(peers + 2, REGION)
    calls = own + block
    call = tl.load(calls) + 1
    index = block * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(x.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    # All ones, a NaN in every type, would be zero: another NaN takes their place.
    sent = ~tl.where(word == -1, 0x7FFFFFFF, word)
    place = MAX_BLOCKS + (call & 1) * (WORLD * MAX_BLOCKS * BLOCK) + index
    for peer in tl.static_range(WORLD):
        slot = _region(peers + 4 + 2 * peer, REGION) + rank * (MAX_BLOCKS * BLOCK)
        tl.store(tl.multiple_of(slot + place, 16), sent, mask=mask & (rank != peer))

    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD):
        source = tl.multiple_of(own + peer * (MAX_BLOCKS * BLOCK) + place, 16)
        found = _await_words(source, mask & (rank != peer), MAX_POLLS)
        found = tl.where(rank == peer, word, found)
        if out.dtype.element_ty == tl.float32:
            low += found.to(tl.float32, bitcast=True)
        else:
            low += found.to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
            high += (found >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
        tl.store(source, index * 0, mask=mask & (rank != peer))

    if out.dtype.element_ty == tl.float32:
        total = low.to(tl.int32, bitcast=True)
    else:
        bits_low = low.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        total = bits_low | (high.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    tl.store(out.to(tl.pointer_type(tl.int32)) + index, total, mask=mask)
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
    """Writes part [rank] of every device's x, BLOCK 32-bit words of it, one behind the other in the order of ranks.

    With a part_stride of 0 all have the one part that x is.
    """
    block = tl.program_id(0)
    rank = tl.load(peers)
    own = _region(peers + 2, REGION)
    calls = own + block
    call = tl.load(calls) + 1
    index = block * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    place = (call & 1) * (WORLD * MAX_BLOCKS * BLOCK) + index
    for peer in tl.static_range(WORLD):
        word = tl.load(x + peer * part_stride + index, mask=mask, other=0)
        slot = _pairs(_region(peers + 4 + 2 * peer, REGION), MAX_BLOCKS) + rank * (MAX_BLOCKS * BLOCK)
        tl.store(slot + place, (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32), mask=mask)
    for peer in tl.static_range(WORLD):
        slot = _pairs(own, MAX_BLOCKS) + peer * (MAX_BLOCKS * BLOCK)
        tl.store(out + peer * num_words + index, _await_pairs(slot + place, mask, call, MAX_POLLS), mask=mask)
    tl.store(calls, call)


@triton.jit
def stop_with_an_error():
    """Makes the launch fail: CUDA's device is lost to the process."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _await_words(source, mask, MAX_POLLS: tl.constexpr):
    """The words that come, which are sent inverted."""
    found = tl.load(source, mask=mask, other=1, volatile=True)
    polls = 0
    while (tl.max((found == 0).to(tl.int32), axis=0) > 0) & (polls < MAX_POLLS):
        found = tl.load(source, mask=mask, other=1, volatile=True)
        polls += 1
    if polls == MAX_POLLS:
        stop_with_an_error()
    # No word, inverted, is all ones, which are a NaN in every float type.
    return ~found


@triton.jit
def _await_pairs(source, mask, call, MAX_POLLS: tl.constexpr):
    """The words that come beside the number of this call."""
    found = tl.load(source, mask=mask, volatile=True)
    is_late = mask & ((found >> 32).to(tl.int32) != call)
    polls = 0
    while (tl.max(is_late.to(tl.int32), axis=0) > 0) & (polls < MAX_POLLS):
        found = tl.load(source, mask=mask, volatile=True)
        is_late = mask & ((found >> 32).to(tl.int32) != call)
        polls += 1
    if polls == MAX_POLLS:
        stop_with_an_error()
    return tl.where(is_late, -1, found.to(tl.int32))


@triton.jit
def _region(pair, REGION: tl.constexpr):
    """The region REGION words into the workspace whose address is a pair: numbers of the blocks' calls, two slots."""
    low = tl.load(pair).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(pair + 1).to(tl.int64)
    return (low | (high << 32)).to(tl.pointer_type(tl.int32)) + REGION


@triton.jit
def _pairs(region, MAX_BLOCKS: tl.constexpr):
    """Where the slots of 64-bit words begin in a region."""
    return (region + MAX_BLOCKS).to(tl.pointer_type(tl.int64))
