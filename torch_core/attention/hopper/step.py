"""One step of a multiplying warpgroup of the Hopper prefill kernel: turns, ring slots, softmax, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.hopper.softmax import rescale, softmax_step, unpack_weights

__all__ = ["attend_tile", "mask_scores", "pass_turn", "ring_slot", "skip_tile", "take_turn"]

# Triton takes the first few of the sixteen hardware barriers for itself.
_FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def take_turn(OWN: gl.constexpr):
    """Waits until this warpgroup may issue its products: the softmax of the others fills the time between."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,n", [OWN + _FIRST_BARRIER], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(OWN: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Lets the next warpgroup issue its products."""
    following: gl.constexpr = (OWN + 1) % WARPGROUPS
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,n", [following + _FIRST_BARRIER], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def ring_slot(step, STAGES: gl.constexpr):
    """Slot and phase of the tile number `step` in a ring of STAGES, two or four."""
    if STAGES == 2:
        return step & 1, (step >> 1) & 1
    return step & 3, (step >> 2) & 1


@gluon.jit
def mask_scores(s, first, last, LEFT: gl.constexpr):
    """Raw scores, -inf in the columns outside [first, last] of a row."""
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    keep = columns[None, :] <= last[:, None]
    if LEFT:
        keep = keep & (columns[None, :] >= first[:, None])
    return gl.where(keep, s, float("-inf"))


@gluon.jit
def attend_tile(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, state, first, last,
    OWN: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The scores of key tile `step`, while the values of the tile before are still being weighed."""
    stage, phase = ring_slot(step, STAGES)
    before, phase_before = ring_slot(step - 1, STAGES)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    p = unpack_weights(weights, q, acc)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), phase_before)
    if PING_PONG:
        take_turn(OWN)
    s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    if PING_PONG:
        pass_turn(OWN, WARPGROUPS)
    if OVERLAP:
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        s, acc = warpgroup_mma_wait(0, deps=(s, acc))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if not OVERLAP:
        mbarrier.arrive(v_empty.index(before), count=1)
    if MASKED:
        s = mask_scores(s, first, last, LEFT)
    weights, state = softmax_step(s, state, q, False)
    if OVERLAP:
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        mbarrier.arrive(v_empty.index(before), count=1)
    return weights, rescale(acc, state), state


@gluon.jit
def skip_tile(
    k_full, k_empty, v_full, v_empty, step, OWN: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Lets a tile pass that only the other warpgroups need."""
    stage, phase = ring_slot(step, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)
    if PING_PONG:
        take_turn(OWN)
        pass_turn(OWN, WARPGROUPS)
