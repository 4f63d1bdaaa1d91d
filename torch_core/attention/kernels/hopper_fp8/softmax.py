"""The online softmax of the fp8 Hopper prefill kernel: a thread's share of a tile in one piece of assembly.

`device.hopper_softmax` says how the weights of a tile come from the row's reference of the tiles before.

A tile sets a reference so that its largest weight is 2 ** _TOP. Later weights up to e4m3's largest, 448, keep it;
weights below 2 ** -6 lose bits. Sums are of the weights before they are rounded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.hopper_softmax import NOTHING, ONE, REFERENCE, step_assembly, step_constraints

_COUNT = 64
# Weights begin at 2 to this power; of rows that see few keys of their first tile, lower.
_TOP = gl.constexpr(4)
_FEW_TOP = gl.constexpr(0.0)
_FEW_KEYS = gl.constexpr(32)
_TOP_BITS = "0f40800000"
# A thread's sums, of 16 weights each, beyond it move the reference: below it no weight is above 448, e4m3's largest.
_LIMIT = "0f43E00000"


def _weights() -> list[str]:
    """Words of four weights, keys 8 apart, and their sums s<row><odd>; n<row> is minus the reference."""
    lines = []
    for word in range(_COUNT // 4):
        odd, row, part = word % 2, word // 2 % 2, word // 4
        total = f"s{row}{odd}"
        for i in range(4):
            score = 4 * (4 * part + i) + 2 * row + odd
            lines.append(f"fma.rn.f32 w{i}, $score{score}, scale, n{row}; ex2.approx.ftz.f32 w{i}, w{i};")
            lines.append(f"add.f32 {total}, {total}, w{i};" if part + i else f"mov.f32 {total}, w{i};")
        # Halves are swapped; `unpack_fp8_weights` says why.
        lines.append(
            "cvt.rn.satfinite.e4m3x2.f32 low, w1, w0; cvt.rn.satfinite.e4m3x2.f32 high, w3, w2; "
            f"mov.b32 $word{word}, {{high, low}};"
        )
    return lines


def _assembly(first: bool) -> str:
    def move(row: int) -> str:
        return (
            f"setp.gtu.f32 p, u{row}, {_LIMIT}; sub.f32 c1, t{row}, {_TOP_BITS}; sub.f32 c0, r{row}, c1; "
            f"ex2.approx.ftz.f32 c0, c0; setp.gt.and.f32 q, r{row}, {NOTHING}, p; "
            f"selp.f32 f{row}, c0, {ONE}, q; @p mov.f32 r{row}, c1;"
        )

    return step_assembly(
        _COUNT, first, weights=_weights(),
        begin=[f"sub.f32 r{row}, t{row}, $in{REFERENCE[row]};" for row in (0, 1)], move=move, limit=_LIMIT,
        registers=".reg .f32 w<4>; .reg .b16 low, high;",
    )  # fmt: skip


# By whether the tile is a row's first.
_STEPS = gl.constexpr(tuple(_assembly(first) for first in (False, True)))
_CONSTRAINTS = gl.constexpr(step_constraints(_COUNT))


@gluon.jit
def initial_fp8_state(scale, keys, S_LAYOUT: gl.constexpr):
    """The state of rows before their first tile, of which they see `keys`: how high weights begin, and the scale.

    The largest of a few scores is soon outgrown: those rows begin lower, or most warps would go the long way.
    """
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, S_LAYOUT))
    top = gl.where(keys < _FEW_KEYS, _FEW_TOP, _TOP + 0.0)
    # The places of references are among a thread's first columns, that of the scale is not.
    return gl.where(columns[None, :] < 8, top[:, None], scale + gl.zeros([64, 128], gl.float32, S_LAYOUT))


@gluon.jit
def fp8_softmax_step(s, state, FIRST: gl.constexpr):
    """(Words of four e4m3 weights, `[64, 32]`, the rows' state) after a tile of 128 raw scores, -inf where masked.

    The keys are in the order of `transpose_values`.
    """
    words, state = gl.inline_asm_elementwise(
        _STEPS[int(FIRST)], _CONSTRAINTS, [s, state], dtype=(gl.int32, gl.float32), is_pure=False, pack=64
    )
    # Of a row of the products, a thread has the columns 8 * i + 2 * t + (0, 1), t from 0 to 3; of a left operand it
    # gives the columns 16 * i + 4 * t + (0, 1, 2, 3). In that order of keys these are the same weights.
    words, _ = gl.split(words.reshape([64, 2, 64]).permute((0, 2, 1)))
    words, _ = gl.split(words.reshape([64, 2, 32]).permute((0, 2, 1)))
    return words.reshape([64, 4, 4, 2]).permute((0, 1, 3, 2)).reshape([64, 32]), state
