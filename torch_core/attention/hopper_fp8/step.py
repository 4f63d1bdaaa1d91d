"""The steps of a multiplying warpgroup of the fp8 Hopper prefill kernel: softmax, weights in e4m3, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.device.hopper_rows import mask_scores
from torch_core.device.hopper_turns import pass_turn, ring_slot, take_turn

__all__ = ["FP8_WEIGHT_BITS", "add_product", "attend_fp8_tiles", "fp8_softmax_step", "pack_fp8_weights", "weigh_values"]

#: The largest weight of a row is 2 to this power: e4m3 ends at 448, and below 2**-6 it loses bits.
FP8_WEIGHT_BITS = gl.constexpr(8)


@gluon.jit
def fp8_softmax_step(s, row_max, row_sum, scale, first, last, MASKED: gl.constexpr, LEFT: gl.constexpr):
    """One step of the online softmax on raw products; columns outside [first, last] of a row are masked.

    Weights are 2**FP8_WEIGHT_BITS times exp2(s * scale - max); the sums are of the weights before they are rounded.
    """
    if MASKED:
        s = mask_scores(s, first, last, LEFT)
    blocks = s.reshape([s.shape[0], s.shape[1] // 8, 8])
    new_max = gl.maximum(row_max, gl.convert_layout(gl.max(gl.max(blocks, 1), 1), row_max.type.layout))
    # Rows that have seen no key are shifted by 0: -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max) * scale
    weights = gl.exp2(s * scale - (shift - FP8_WEIGHT_BITS)[:, None])
    keep_factor = gl.exp2(row_max * scale - shift)
    sums = gl.sum(weights.reshape([s.shape[0], s.shape[1] // 8, 8]), 1)
    if row_sum is not None:
        sums = row_sum * gl.convert_layout(keep_factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, keep_factor, new_max, sums


@gluon.jit
def attend_fp8_tiles(
    q, rings, step, acc, row_max, weights, keep, row_sum, scale, first, last, start, end, OWN: gl.constexpr,
    SHAPE: gl.constexpr, PROMOTE: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, as `_attend_tiles` of the 16-bit kernel does.

    With PROMOTE, `keep` is the factor that `acc` still lacks before the values of the tile before are added.

    Returns:
        The next (step, acc, row_max, weights, keep, row_sum).
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
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.wait(values.full.index(before), phase_before)
        if SHAPE.PING_PONG:
            take_turn(OWN)
        s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        product = weigh_values(weights, values.tiles.index(before), acc, PROMOTE)
        if SHAPE.PING_PONG:
            pass_turn(OWN, SHAPE.WARPGROUPS)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        weights, new_keep, row_max, row_sum = fp8_softmax_step(
            s, row_max, row_sum, scale, tile_first, tile_last, MASKED, LEFT
        )
        product, weights = warpgroup_mma_wait(0, deps=(product, weights))
        mbarrier.arrive(values.empty.index(before), count=1)
        acc = add_product(acc, keep, product, PROMOTE)
        if not PROMOTE:
            acc = acc * gl.convert_layout(new_keep, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = pack_fp8_weights(weights)
        keep = new_keep
        step += 1
    return step, acc, row_max, weights, keep, row_sum


@gluon.jit
def weigh_values(weights, values, acc, PROMOTE: gl.constexpr):
    """Issues the product of packed weights with a transposed tile of values, onto `acc` unless PROMOTE."""
    p = _unpack_weights(weights, acc)
    if PROMOTE:
        layout: gl.constexpr = acc.type.layout
        start = gl.zeros([acc.shape[0], acc.shape[1]], gl.float32, layout)
        product = warpgroup_mma(p, values.permute((1, 0)), start, use_acc=False, is_async=True)
    else:
        product = warpgroup_mma(p, values.permute((1, 0)), acc, is_async=True)
    return product


@gluon.jit
def add_product(acc, keep, product, PROMOTE: gl.constexpr):
    """The sums with the product of `weigh_values`, in float32 where PROMOTE."""
    if PROMOTE:
        product = acc * gl.convert_layout(keep, gl.SliceLayout(1, acc.type.layout))[:, None] + product
    return product


@gluon.jit
def pack_fp8_weights(weights):
    """Weights rounded to e4m3, four to an integer, with the keys in the order of `transpose_values`.

    Of a row of the products, a thread has the columns 8 * i + 2 * t + (0, 1), t from 0 to 3; of a left operand it
    gives the columns 16 * i + 4 * t + (0, 1, 2, 3). In that order of keys these are the same weights: none moves to
    another thread.
    """
    ROWS: gl.constexpr = weights.shape[0]
    # Axes: row; bits 5-6, 4, 3, 1-2 and 0 of the key.
    bits = weights.reshape([ROWS, 4, 2, 2, 4, 2]).permute((0, 1, 5, 4, 2, 3)).reshape([ROWS, 32, 2, 2])
    low, high = gl.split(bits)
    a, c = gl.split(low)
    b, d = gl.split(high)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _unpack_weights(packed, acc):
    """The weights as the left operand of the product with values."""
    # Each integer four times over, side by side where the operand has its bytes: the assembly names them all at once.
    words = gl.join(packed, packed)
    words = gl.join(words, words).reshape([packed.shape[0], packed.shape[1] * 4])
    words = gl.convert_layout(words, gl.DotOperandLayout(0, acc.type.layout, 4))
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    return p.to(gl.float8e4nv, bitcast=True)
