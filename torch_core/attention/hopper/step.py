"""The steps of a multiplying warpgroup of the Hopper prefill kernel: products and softmax of tiles of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.hopper.softmax import rescale, softmax_step, unpack_weights
from torch_core.device.hopper_rows import mask_scores
from torch_core.device.hopper_turns import pass_turn, ring_slot, take_turn

__all__ = ["attend_tiles"]


@gluon.jit
def attend_tiles(
    q, rings, step, acc, weights, state, first, last, start, end, OWN: gl.constexpr, SHAPE: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, last ones first; with MASKED, rows see the keys [first, last].

    Products and softmax overlap: the scores of tile `step` are made while the values of the one before are weighed.

    Returns:
        The next (step, acc, weights, state); the values of the last tile are not in `acc` yet.
    """
    keys = rings.key
    values = rings.value
    for i in range(end - start):
        position = (end - 1 - i) * SHAPE.BLOCK_N
        tile_first = first - position
        tile_last = last - position
        stage, phase = ring_slot(keys, step)
        before, phase_before = ring_slot(values, step - 1)
        zeros = gl.zeros([64, SHAPE.BLOCK_N], gl.float32, S_LAYOUT)
        p = unpack_weights(weights, q, acc)
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.wait(values.full.index(before), phase_before)
        if SHAPE.PING_PONG:
            take_turn(OWN)
        s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, values.tiles.index(before), acc, is_async=True)
        if SHAPE.PING_PONG:
            pass_turn(OWN, SHAPE.WARPGROUPS)
        if OVERLAP:
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            s, acc = warpgroup_mma_wait(0, deps=(s, acc))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        if not OVERLAP:
            mbarrier.arrive(values.empty.index(before), count=1)
        if MASKED:
            s = mask_scores(s, tile_first, tile_last, LEFT)
        weights, state = softmax_step(s, state, q, False)
        if OVERLAP:
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            mbarrier.arrive(values.empty.index(before), count=1)
        acc = rescale(acc, state)
        step += 1
    return step, acc, weights, state
