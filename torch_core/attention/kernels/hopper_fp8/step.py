"""The steps of a multiplying warpgroup of the fp8 Hopper prefill kernel: softmax, weights in e4m3, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.kernels.hopper_fp8.softmax import fp8_softmax_step
from torch_core.device.hopper_rows import mask_scores
from torch_core.device.hopper_softmax import rescale
from torch_core.device.hopper_turns import ring_slot

__all__ = ["attend_fp8_tiles", "weigh_tile"]

# Into registers of its own: without it the next weights would go where these are still being multiplied, and ptxas
# would wait after each product.
_SWAP_BACK = gl.constexpr("prmt.b32 $0, $1, 0, 0x1032;")


@gluon.jit
def attend_fp8_tiles(
    q, rings, step, acc, words, state, first, last, start, end, OWN: gl.constexpr, SHAPE: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, last ones first; with MASKED, rows see the keys [first, last].

    With OVERLAP the scores of tile `step` are made while the values of the one before are weighed, and the values of
    the last tile are not in `acc` yet. Without, a tile is done with when the next one begins: fewer registers.

    Returns:
        The next (step, acc, words, state).
    """
    keys = rings.key
    values = rings.value
    for i in range(end - start):
        position = (end - 1 - i) * SHAPE.BLOCK_N
        tile_first = first - position
        tile_last = last - position
        stage, phase = ring_slot(keys, step)
        before, phase_before = ring_slot(values, step - 1)
        zeros = gl.zeros([64, 128], gl.float32, S_LAYOUT)
        if OVERLAP:
            p = _unpack_weights(words, acc)
        mbarrier.wait(keys.full.index(stage), phase)
        if OVERLAP:
            mbarrier.wait(values.full.index(before), phase_before)
        s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if OVERLAP:
            acc = warpgroup_mma(p, values.tiles.index(before).permute((1, 0)), acc, is_async=True)
        s = warpgroup_mma_wait(1 if OVERLAP else 0, deps=(s,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        if MASKED:
            s = mask_scores(s, tile_first, tile_last, LEFT)
        words, state = fp8_softmax_step(s, state, False)
        if OVERLAP:
            acc, words = warpgroup_mma_wait(0, deps=(acc, words))
            mbarrier.arrive(values.empty.index(before), count=1)
        acc = rescale(acc, state)
        if not OVERLAP:
            acc = weigh_tile(words, acc, values, step)
        step += 1
    return step, acc, words, state


@gluon.jit
def weigh_tile(words, acc, values, step):
    """The sums with the values of the tile `step`, weighed."""
    slot, phase = ring_slot(values, step)
    p = _unpack_weights(words, acc)
    mbarrier.wait(values.full.index(slot), phase)
    acc = warpgroup_mma(p, values.tiles.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(values.empty.index(slot), count=1)
    return acc


@gluon.jit
def _unpack_weights(packed, acc):
    """The weights as the left operand of the product with values."""
    # Each integer four times over, side by side where the operand has its bytes: the assembly names them all at once.
    words = gl.join(packed, packed)
    words = gl.join(words, words).reshape([packed.shape[0], packed.shape[1] * 4])
    words = gl.convert_layout(words, gl.DotOperandLayout(0, acc.type.layout, 4))
    p = gl.inline_asm_elementwise(_SWAP_BACK, "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    return p.to(gl.float8e4nv, bitcast=True)
