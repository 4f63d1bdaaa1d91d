"""The steps of a multiplying warpgroup of the fp8 Hopper prefill kernel: softmax, weights in e4m3, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.hopper.softmax import rescale
from torch_core.attention.hopper_fp8.softmax import fp8_softmax_step
from torch_core.device.hopper_rows import mask_scores
from torch_core.device.hopper_turns import pass_turn, ring_slot, take_turn

__all__ = ["add_product", "attend_fp8_tiles", "unpack_fp8_weights", "weigh_values"]

# Into registers of its own: without it the next weights would go where these are still being multiplied, and ptxas
# would wait after each product.
_SWAP_BACK = gl.constexpr("prmt.b32 $0, $1, 0, 0x1032;")


@gluon.jit
def attend_fp8_tiles(
    q, rings, step, acc, words, state, first, last, start, end, OWN: gl.constexpr, SHAPE: gl.constexpr,
    PROMOTE: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, as `_attend_tiles` of the 16-bit kernel does.

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
        p = unpack_fp8_weights(words, acc)
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.wait(values.full.index(before), phase_before)
        if SHAPE.PING_PONG:
            take_turn(OWN)
        s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        product = weigh_values(p, values.tiles.index(before), acc, PROMOTE)
        if SHAPE.PING_PONG:
            pass_turn(OWN, SHAPE.WARPGROUPS)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        if MASKED:
            s = mask_scores(s, tile_first, tile_last, LEFT)
        words, state = fp8_softmax_step(s, state, False)
        product, words = warpgroup_mma_wait(0, deps=(product, words))
        mbarrier.arrive(values.empty.index(before), count=1)
        acc = rescale(add_product(acc, product, PROMOTE), state)
        step += 1
    return step, acc, words, state


@gluon.jit
def weigh_values(p, values, acc, PROMOTE: gl.constexpr):
    """Issues the product of weights with a transposed tile of values, onto `acc` unless PROMOTE."""
    if PROMOTE:
        layout: gl.constexpr = acc.type.layout
        start = gl.zeros([acc.shape[0], acc.shape[1]], gl.float32, layout)
        product = warpgroup_mma(p, values.permute((1, 0)), start, use_acc=False, is_async=True)
    else:
        product = warpgroup_mma(p, values.permute((1, 0)), acc, is_async=True)
    return product


@gluon.jit
def add_product(acc, product, PROMOTE: gl.constexpr):
    """The sums with the product of `weigh_values`, in float32 where PROMOTE."""
    if PROMOTE:
        product = acc + product
    return product


@gluon.jit
def unpack_fp8_weights(packed, acc):
    """The weights as the left operand of the product with values."""
    # Each integer four times over, side by side where the operand has its bytes: the assembly names them all at once.
    words = gl.join(packed, packed)
    words = gl.join(words, words).reshape([packed.shape[0], packed.shape[1] * 4])
    words = gl.convert_layout(words, gl.DotOperandLayout(0, acc.type.layout, 4))
    p = gl.inline_asm_elementwise(_SWAP_BACK, "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    return p.to(gl.float8e4nv, bitcast=True)
