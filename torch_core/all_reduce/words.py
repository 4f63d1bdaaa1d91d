"""Words go between devices that see each other's memory; those that are floats are added.

There is no fence and no separate flag: a word shows by itself that it has arrived (one shot, as in vLLM's
csrc/custom_all_reduce.cuh). An exchange sends each word together with the number of the call, in 64 bits that are
written at once (the LL protocol of NCCL, arXiv:2507.04786). A sum sends words without a number, inverted, because
zero means "not arrived": floats have an unused bit pattern, and half the bytes move (TensorRT-LLM's one-shot sums
reserve -0.0, and call it Lamport). The reader of such words overwrites them with zeros. A larger sum goes in two
shots, as vLLM's: each device adds a share, and the sums go out in the same way.

Two alternating slots are enough: a block's words go to the same block of the other devices, and a device that has a
peer's words of this call knows that the peer's last call, and so its reading of the other slot, is over. A word
that has not arrived after MAX_POLLS polls becomes NaN, and the launch is an error.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_words(
    word, peers, own, place, mask, call, dtype: tl.constexpr, WORLD: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """Returns (low, high): the float32 sums over devices of the halves of words (`split_words`), in rank order.

    `word` int32[blocks, BLOCK] is this device's, `own` its slots; each word stands at `place` behind the start of a
    rank's words. Where `mask` is false there is no word, and the sum is noise.
    """
    SLOT: tl.constexpr = MAX_BLOCKS * word.shape[1]
    rank = tl.load(peers)
    sent = _sent(word)
    for peer in tl.static_range(WORLD):
        slot = slots_at(peers + 4 + 2 * peer, MAX_BLOCKS, REGION) + rank * SLOT
        # Said of all addresses, for threads to move 16 bytes at a time: of the slot alone it is lost in the additions.
        tl.store(tl.multiple_of(slot + place, [1, 16]), sent, mask=mask & (rank != peer))
    return _added(word, own, place, mask, rank, call, dtype, WORLD, SLOT, MAX_POLLS)


@triton.jit
def add_shares(
    x, index, end, peers, own, calls, place, dtype: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, SHARE: tl.constexpr, COLUMNS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    MAX_POLLS: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """Returns the sums over devices of WORLD times SHARE words of x in two shots: a tuple with the words of each share.

    Each device adds the share of its rank, and sends the sums to the others: 2 / WORLD of the bytes of `add_words`.
    Share r is the words from `index + r * SHARE` on, int32[1, COLUMNS], of which there are SHARE; those from `end` on
    are zeros, and go too. The program has BLOCKS of the region's blocks, one or two: `calls` is where the first counts
    its calls, and `place` the words' place behind the start of that block in a rank's slot. The halves of the blocks
    take the two shots.
    """
    SLOT: tl.constexpr = MAX_BLOCKS * BLOCK
    words: tl.constexpr = tl.pointer_type(tl.int32)
    rank = tl.load(peers)
    mask = tl.arange(0, COLUMNS)[None, :] < SHARE
    last = calls + (BLOCKS - 1)
    call = tl.load(calls) + 1
    last_call = tl.load(last) + 1
    first = (call & 1) * (WORLD * SLOT) + place
    second = (last_call & 1) * (WORLD * SLOT) + place + BLOCKS * BLOCK // 2
    for peer in tl.static_range(WORLD):
        share = index + peer * SHARE
        word = tl.load(x.to(words) + share, mask=mask & (share < end), other=0)
        slot = slots_at(peers + 4 + 2 * peer, MAX_BLOCKS, REGION) + rank * SLOT
        tl.store(tl.multiple_of(slot + first, [1, 16]), _sent(word), mask=mask & (rank != peer))
    share = index + rank * SHARE
    word = tl.load(x.to(words) + share, mask=mask & (share < end), other=0)
    low, high = _added(word, own, first, mask, rank, call, dtype, WORLD, SLOT, MAX_POLLS)

    sent = _sent(join_words(low, high, dtype))
    for peer in tl.static_range(WORLD):
        slot = slots_at(peers + 4 + 2 * peer, MAX_BLOCKS, REGION) + rank * SLOT
        tl.store(tl.multiple_of(slot + second, [1, 16]), sent, mask=mask & (rank != peer))
    found = await_words(own, second, mask, rank, call, WORLD, SLOT, MAX_POLLS)
    sums = ()
    for peer in tl.static_range(WORLD):
        sums = sums + (~tl.where(rank == peer, sent, found[peer]),)  # noqa: RUF005 - Triton has no starred tuples.
        source = tl.multiple_of(own + peer * SLOT + second, [1, 16])
        tl.store(source, tl.zeros_like(sent), mask=mask & (rank != peer))
    tl.store(calls, call)
    tl.store(last, last_call)
    return sums


@triton.jit
def split_words(word, dtype: tl.constexpr):
    """Returns the floats in the low and high half of words, as float32; the second is 0 for words of 32 bits."""
    if dtype == tl.float32:
        low = word.to(tl.float32, bitcast=True)
        high = tl.zeros(word.shape, tl.float32)
    else:
        low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def join_words(low, high, dtype: tl.constexpr):
    """Returns the words that `split_words` splits; rounds."""
    if dtype == tl.float32:
        word = low.to(tl.int32, bitcast=True)
    else:
        bits = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = bits | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@triton.jit
def await_words(own, place, mask, without, call, WORLD: tl.constexpr, SLOT: tl.constexpr, MAX_POLLS: tl.constexpr):
    """Returns a tuple of each rank's words except those of `without`, or of pairs (word, number of its call).

    All are looked at together, since a look takes as long for one as for all.
    """
    words, is_late = _look(own, place, mask, without, call, WORLD, SLOT)
    polls = 0
    while (tl.max(is_late.to(tl.int32)) > 0) & (polls < MAX_POLLS):
        words, is_late = _look(own, place, mask, without, call, WORLD, SLOT)
        polls += 1
    if polls == MAX_POLLS:
        stop_with_an_error()
    return words


@triton.jit
def is_none(word, call):
    """Returns which words, or pairs, have not come."""
    return word == 0 if word.dtype == tl.int32 else (word >> 32).to(tl.int32) != call


@triton.jit
def slots_at(pair, MAX_BLOCKS: tl.constexpr, REGION: tl.constexpr):
    """Slots, behind the calls' numbers, of the region REGION words into the workspace that a pair of words names."""
    low = tl.load(pair).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(pair + 1).to(tl.int64)
    return (low | (high << 32)).to(tl.pointer_type(tl.int32)) + (REGION + MAX_BLOCKS)


@triton.jit
def stop_with_an_error():
    """Makes the launch fail: CUDA's device is lost to the process."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _sent(word):
    """Returns words as they go to other devices."""
    # All ones, a NaN in every type, would be zero: another NaN takes their place.
    return ~tl.where(word == -1, 0x7FFFFFFF, word)


@triton.jit
def _added(
    word, own, place, mask, rank, call, dtype: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr,
    MAX_POLLS: tl.constexpr,
):  # fmt: skip
    """Returns what `add_words` does, when this device's words have been sent."""
    words = await_words(own, place, mask, rank, call, WORLD, SLOT, MAX_POLLS)
    low = tl.zeros(word.shape, tl.float32)
    high = tl.zeros(word.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        # No word, inverted, is all ones, which are a NaN in every float type.
        found_low, found_high = split_words(tl.where(rank == peer, word, ~words[peer]), dtype)
        low += found_low
        high += found_high
        source = tl.multiple_of(own + peer * SLOT + place, [1, 16])
        tl.store(source, tl.zeros_like(word), mask=mask & (rank != peer))
    return low, high


@triton.jit
def _look(own, place, mask, without, call, WORLD: tl.constexpr, SLOT: tl.constexpr):
    words = ()
    is_late = mask & False
    for peer in tl.static_range(WORLD):
        source = tl.multiple_of(own + peer * SLOT + place, [1, 16])
        wanted = mask & (without != peer)
        word = tl.load(source, mask=wanted, other=0, volatile=True)
        words = words + (word,)  # noqa: RUF005 - Triton has no starred tuples.
        is_late = is_late | (wanted & is_none(word, call))
    return words, is_late
