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
    rank, own, calls, call, index, mask, place = _begin(peers, num_words, WORLD, BLOCK, MAX_BLOCKS, REGION)
    word = tl.load(x.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    # All ones, a NaN in every type, would be zero: another NaN takes their place.
    sent = ~tl.where(word == -1, 0x7FFFFFFF, word)
    for peer in tl.static_range(WORLD):
        slot = _slots(peers + 4 + 2 * peer, MAX_BLOCKS, REGION) + rank * (MAX_BLOCKS * BLOCK)
        tl.store(tl.multiple_of(slot + place, 16), sent, mask=mask & (rank != peer))

    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD):
        source = tl.multiple_of(own + peer * (MAX_BLOCKS * BLOCK) + place, 16)
        found, _ = _await(source, mask & (rank != peer), call, MAX_POLLS)
        # No word, inverted, is all ones, which are a NaN in every float type.
        found = tl.where(rank == peer, word, ~found)
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
    rank, own, calls, call, index, mask, place = _begin(peers, num_words, WORLD, BLOCK, MAX_BLOCKS, REGION)
    pairs: tl.constexpr = tl.pointer_type(tl.int64)
    for peer in tl.static_range(WORLD):
        word = tl.load(x + peer * part_stride + index, mask=mask, other=0)
        slot = _slots(peers + 4 + 2 * peer, MAX_BLOCKS, REGION).to(pairs) + rank * (MAX_BLOCKS * BLOCK)
        tl.store(slot + place, (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32), mask=mask)
    own = own.to(pairs)
    for peer in tl.static_range(WORLD):
        found, is_late = _await(own + peer * (MAX_BLOCKS * BLOCK) + place, mask, call, MAX_POLLS)
        tl.store(out + peer * num_words + index, tl.where(is_late, -1, found.to(tl.int32)), mask=mask)
    tl.store(calls, call)


@triton.jit
def stop_with_an_error():
    """Makes the launch fail: CUDA's device is lost to the process."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _begin(peers, num_words, WORLD: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr, REGION: tl.constexpr):
    """Finds where the block stands.

    Returns:
        (rank, own slots, where the block counts its calls, number of this one, the block's words, which of them there
        are, their places behind the start of a rank's slots).
    """
    block = tl.program_id(0)
    rank = tl.load(peers)
    own = _slots(peers + 2, MAX_BLOCKS, REGION)
    calls = own - MAX_BLOCKS + block
    call = tl.load(calls) + 1
    index = block * BLOCK + tl.arange(0, BLOCK)
    return rank, own, calls, call, index, index < num_words, (call & 1) * (WORLD * MAX_BLOCKS * BLOCK) + index


@triton.jit
def _await(source, mask, call, MAX_POLLS: tl.constexpr):
    """Returns what has come, and which of it is none: words alone, or pairs of a word and the number of its call."""
    found, is_late = _look(source, mask, call)
    polls = 0
    while (tl.max(is_late.to(tl.int32), axis=0) > 0) & (polls < MAX_POLLS):
        found, is_late = _look(source, mask, call)
        polls += 1
    if polls == MAX_POLLS:
        stop_with_an_error()
    return found, is_late


@triton.jit
def _look(source, mask, call):
    if source.dtype.element_ty == tl.int32:
        found = tl.load(source, mask=mask, other=1, volatile=True)
        is_late = found == 0
    else:
        found = tl.load(source, mask=mask, volatile=True)
        is_late = mask & ((found >> 32).to(tl.int32) != call)
    return found, is_late


@triton.jit
def _slots(pair, MAX_BLOCKS: tl.constexpr, REGION: tl.constexpr):
    """The slots of the region that begins REGION words into the workspace whose address is a pair of words.

    They stand behind the numbers of the blocks' calls.
    """
    low = tl.load(pair).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(pair + 1).to(tl.int64)
    return (low | (high << 32)).to(tl.pointer_type(tl.int32)) + (REGION + MAX_BLOCKS)
