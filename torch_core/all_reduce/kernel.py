"""Kernels of devices that see each other's memory: they sum or exchange small arrays without waiting for the host.

A block sends its words to every device's workspace, each beside the number of the call in one 64-bit word, which is
written whole: a word that has this call's number has its data too, so nothing is fenced and no flag is sent apart (the
LL protocol of NCCL, arXiv:2507.04786; one shot, as in vLLM's csrc/custom_all_reduce.cuh). It waits for the same block
of the others alone. Two slots in turn are enough: who has a peer's words of this call knows that the peer's last call,
and so its reading of the other slot, is over. What has not come after MAX_POLLS looks is NaN, and the launch an error.
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
):
    """Writes the sum over WORLD devices of BLOCK 32-bit words of x, added in float32 in the order of ranks."""
    block = tl.program_id(0)
    own, calls, call = _begin(peers, block)
    index = block * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    word = tl.load(x.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    for peer in tl.static_range(WORLD):
        _send(word, peers, peer, index, mask, call, WORLD, BLOCK, MAX_BLOCKS)

    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD):
        found = _receive(own, peer, index, mask, call, WORLD, BLOCK, MAX_BLOCKS, MAX_POLLS)
        if out.dtype.element_ty == tl.float32:
            low += found.to(tl.float32, bitcast=True)
        else:
            low += found.to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
            high += (found >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)

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
):
    """Writes part [rank] of every device's x, BLOCK 32-bit words of it, one behind the other in the order of ranks.

    With a part_stride of 0 all have the one part that x is.
    """
    block = tl.program_id(0)
    own, calls, call = _begin(peers, block)
    index = block * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_words
    for peer in tl.static_range(WORLD):
        word = tl.load(x + peer * part_stride + index, mask=mask, other=0)
        _send(word, peers, peer, index, mask, call, WORLD, BLOCK, MAX_BLOCKS)
    for peer in tl.static_range(WORLD):
        found = _receive(own, peer, index, mask, call, WORLD, BLOCK, MAX_BLOCKS, MAX_POLLS)
        tl.store(out + peer * num_words + index, found, mask=mask)
    tl.store(calls, call)


@triton.jit
def stop_with_an_error():
    """Makes the launch fail: CUDA's device is lost to the process."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _begin(peers, block):
    """Returns this device's workspace, where it counts the block's calls, and the number of this one."""
    own = _address(peers + 2)
    calls = own.to(tl.pointer_type(tl.int32)) + block
    return own, calls, tl.load(calls) + 1


@triton.jit
def _send(word, peers, peer, index, mask, call, WORLD: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    sent = (word.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    slot = _slot(tl.load(peers), call, WORLD, BLOCK, MAX_BLOCKS)
    tl.store(_address(peers + 4 + 2 * peer) + slot + index, sent, mask=mask)


@triton.jit
def _receive(
    own,
    peer,
    index,
    mask,
    call,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr,
):
    source = own + _slot(peer, call, WORLD, BLOCK, MAX_BLOCKS) + index
    found = tl.load(source, mask=mask, volatile=True)
    is_late = mask & ((found >> 32).to(tl.int32) != call)
    polls = 0
    while (tl.max(is_late.to(tl.int32), axis=0) > 0) & (polls < MAX_POLLS):
        found = tl.load(source, mask=mask, volatile=True)
        is_late = mask & ((found >> 32).to(tl.int32) != call)
        polls += 1
    if polls == MAX_POLLS:
        stop_with_an_error()
    # All ones are a NaN in every float type.
    return tl.where(is_late, -1, found.to(tl.int32))


@triton.jit
def _slot(rank, call, WORLD: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    # The numbers of the blocks' calls stand before the slots, of which each has the words of every rank.
    return MAX_BLOCKS // 2 + ((call & 1) * WORLD + rank) * (MAX_BLOCKS * BLOCK)


@triton.jit
def _address(pair):
    low = tl.load(pair).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(pair + 1).to(tl.int64)
    return (low | (high << 32)).to(tl.pointer_type(tl.int64))
