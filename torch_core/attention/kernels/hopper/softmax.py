"""The softmax step of the 16-bit Hopper prefill kernel: weights in bfloat16 or float16; see device.hopper_softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.device.hopper_softmax import NOTHING, ONE, step_assembly, step_constraints

# Sums beyond it move the reference; weights must stay below the largest float16 too.
_LIMIT = "0f44800000"


def _weights(count: int, convert: str) -> list[str]:
    """Weights of a thread's `count` scores in pairs, and their sums s<row><odd>; n<row> is minus the reference."""
    lines = []
    for pair in range(count // 2):
        row, column = pair % 2, pair // 2
        for odd in (0, 1):
            total = f"s{row}{odd}"
            lines.append(f"fma.rn.f32 w{odd}, $score{4 * column + 2 * row + odd}, scale, n{row};")
            lines.append(f"ex2.approx.ftz.f32 w{odd}, w{odd};")
            lines.append(f"add.f32 {total}, {total}, w{odd};" if column else f"mov.f32 {total}, w{odd};")
        # The pair's place is so that two halves of the columns are even and odd blocks of eight.
        lines.append(f"{convert} $word{column % 2 + 2 * row + 4 * (column // 2)}, w1, w0;")
    return lines


def _assembly(count: int, first: bool, convert: str) -> str:
    def move(row: int) -> str:
        return (
            f"setp.gtu.f32 p, u{row}, {_LIMIT}; sub.f32 c0, r{row}, t{row}; ex2.approx.ftz.f32 c0, c0; "
            f"setp.gt.and.f32 q, r{row}, {NOTHING}, p; selp.f32 f{row}, c0, {ONE}, q; @p mov.f32 r{row}, t{row};"
        )

    return step_assembly(
        count, first, weights=_weights(count, convert), begin=["mov.f32 r0, t0; mov.f32 r1, t1;"], move=move,
        limit=_LIMIT, registers=".reg .f32 w0, w1;",
    )  # fmt: skip


_CONVERT = ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
# By whether the weights are float16, and whether the tile is a row's first.
_STEP_64 = gl.constexpr(tuple(_assembly(64, first, convert) for convert in _CONVERT for first in (False, True)))
_STEP_32 = gl.constexpr(tuple(_assembly(32, first, convert) for convert in _CONVERT for first in (False, True)))
_CONSTRAINTS_64 = gl.constexpr(step_constraints(64))
_CONSTRAINTS_32 = gl.constexpr(step_constraints(32))


@gluon.jit
def initial_state(scale, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """The state of rows before their first tile, which needs the scale alone."""
    return gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT) + scale


@gluon.jit
def softmax_step(s, state, q, FIRST: gl.constexpr):
    """(Pairs of weights for `unpack_weights`, the rows' state) after a tile of raw scores, -inf where masked."""
    kind: gl.constexpr = 2 * (q.dtype == gl.float16) + FIRST
    if s.shape[1] == 128:
        return gl.inline_asm_elementwise(
            _STEP_64[kind], _CONSTRAINTS_64, [s, state], dtype=(gl.int32, gl.float32), is_pure=False, pack=64
        )
    return gl.inline_asm_elementwise(
        _STEP_32[kind], _CONSTRAINTS_32, [s, state], dtype=(gl.int32, gl.float32), is_pure=False, pack=32
    )


@gluon.jit
def unpack_weights(pairs, q, acc):
    """The weights as the left operand of the product with values."""
    N: gl.constexpr = pairs.shape[1]
    halves, _ = gl.split(pairs.reshape([64, 2, N // 16, 4, 2]).permute(0, 2, 3, 4, 1))
    halves = halves.permute(0, 1, 3, 2).reshape([64, N // 2])
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [halves], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(low, high).reshape([64, N]).to(q.dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))
