"""One step of a multiplying warpgroup of the Hopper prefill kernel: turns, ring slots, softmax, products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

__all__ = [
    "attend_tile",
    "pack_weights",
    "pass_turn",
    "ring_slot",
    "skip_tile",
    "softmax_step",
    "take_turn",
    "unpack_weights",
]

# Triton takes the first few of the sixteen hardware barriers for itself.
_FIRST_BARRIER = gl.constexpr(8)
# Elements of a thread that one test of `_rescale` covers: all that a head of 64 has.
_RESCALED = gl.constexpr(32)


def _rescale_assembly(count: int) -> str:
    # Operands: `count` values in and out, the same again (tied), `count` factors, in the order of the matrix units:
    # two columns of one row, the same columns of the row 8 below, and so on.
    factors = (f"${2 * count}", f"${2 * count + 2}")
    products = "".join(f"mul.f32 ${i}, ${i}, {factors[i // 2 % 2]}; " for i in range(count))
    return (
        f"{{ .reg .pred changed; setp.neu.f32 changed, {factors[0]}, 0f3F800000; "
        f"setp.neu.or.f32 changed, {factors[1]}, 0f3F800000, changed; vote.sync.any.pred changed, changed, 0xffffffff; "
        f"@!changed bra same; {products}same: }}"
    )


_RESCALE = gl.constexpr(_rescale_assembly(_RESCALED.value))
_RESCALE_CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * _RESCALED.value + [str(i) for i in range(_RESCALED.value)] + ["f"] * _RESCALED.value)
)


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
    """Slot and phase of the tile number `step` in a ring of STAGES, a power of two."""
    if STAGES == 2:
        shift: gl.constexpr = 1
    else:
        shift: gl.constexpr = 2
    return step & (STAGES - 1), (step >> shift) & 1


@gluon.jit
def softmax_step(s, row_max, row_sum, scale, first, last, MASKED: gl.constexpr, LEFT: gl.constexpr):
    """One step of the online softmax on raw products; columns outside [first, last] of a row are masked."""
    if MASKED:
        columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        keep = columns[None, :] <= last[:, None]
        if LEFT:
            keep = keep & (columns[None, :] >= first[:, None])
        s = gl.where(keep, s, float("-inf"))
    blocks = s.reshape([s.shape[0], s.shape[1] // 8, 8])
    new_max = gl.maximum(row_max, gl.convert_layout(gl.max(gl.max(blocks, 1), 1), row_max.type.layout))
    # Rows that have seen no key are shifted by 0: -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max) * scale
    weights = gl.exp2(s * scale - shift[:, None])
    keep_factor = gl.exp2(row_max * scale - shift)
    sums = gl.sum(weights.reshape([s.shape[0], s.shape[1] // 8, 8]), 1)
    if row_sum is not None:
        sums = row_sum * gl.convert_layout(keep_factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, keep_factor, new_max, sums


@gluon.jit
def attend_tile(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, row_max, row_sum, scale, first, last,
    OWN: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr, OVERLAP: gl.constexpr,
    SKIP_RESCALE: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
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
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, keep, row_max, row_sum = softmax_step(s, row_max, row_sum, scale, first, last, MASKED, LEFT)
    if OVERLAP:
        _after(row_sum)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_empty.index(before), count=1)
    factors = gl.convert_layout(keep, gl.SliceLayout(1, acc.type.layout))[:, None]
    acc = _rescale(acc, factors) if SKIP_RESCALE else acc * factors
    return pack_weights(weights, q), acc, row_max, row_sum


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


@gluon.jit
def pack_weights(weights, q):
    """Weights rounded to 16 bits, two side by side in an integer: carried in that form, a loop does not unpack them."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    if q.dtype == gl.bfloat16:
        instruction: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        instruction: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(instruction, "=r,f,f", [low, high], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack_weights(packed, q, acc):
    """The weights as the left operand of the product with values."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    pairs = gl.join(low, high)
    p = pairs.reshape([packed.shape[0], packed.shape[1] * 2]).to(q.dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _rescale(acc, factors):
    """acc * factors, which a warp skips while the maxima of its rows stay: every factor is 1 then."""
    factors, _ = gl.broadcast(factors, acc)
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=True, pack=_RESCALED
    )


@gluon.jit
def _after(row_sum):
    """Ends the softmax before what follows: ptxas would wait for the products first, and then start on it.

    A store that depends on the sums and never happens (they are not negative) holds the order.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; .reg .f32 x, y; add.f32 x, $4, $5; add.f32 y, $6, $7; add.f32 x, x, y; "
        "setp.lt.f32 p, x, 0f00000000; mov.u32 a, 0; @p st.shared.f32 [a], x; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,f,f,f,f", [row_sum], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
