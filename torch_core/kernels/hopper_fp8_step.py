"""One step of a multiplying warpgroup of the fp8 Hopper prefill kernel: softmax, weights in e4m3, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.kernels.hopper_fp8_softmax import fp8_softmax_step
from torch_core.kernels.hopper_softmax import rescale
from torch_core.kernels.hopper_step import mask_scores, pass_turn, ring_slot, take_turn

__all__ = ["add_product", "attend_fp8_tile", "unpack_fp8_weights", "weigh_values"]


@gluon.jit
def attend_fp8_tile(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, state, first, last,
    OWN: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    PROMOTE: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scores of key tile `step`, while the values of the tile before are still being weighed."""
    stage, phase = ring_slot(step, STAGES)
    before, phase_before = ring_slot(step - 1, STAGES)
    zeros = gl.zeros([64, 128], gl.float32, S_LAYOUT)
    p = unpack_fp8_weights(weights, acc)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.wait(v_full.index(before), phase_before)
    if PING_PONG:
        take_turn(OWN)
    s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = weigh_values(p, v_tiles.index(before), acc, PROMOTE)
    if PING_PONG:
        pass_turn(OWN, WARPGROUPS)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        s = mask_scores(s, first, last, LEFT)
    following, state = fp8_softmax_step(s, state, False)
    # With `weights`, or ptxas would give their registers to those that follow, and then run all products in turn.
    product, following, _ = warpgroup_mma_wait(0, deps=(product, following, weights))
    mbarrier.arrive(v_empty.index(before), count=1)
    return following, rescale(add_product(acc, product, PROMOTE), state), state


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
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    return p.to(gl.float8e4nv, bitcast=True)
