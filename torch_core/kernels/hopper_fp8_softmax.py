"""The online softmax of the fp8 Hopper prefill kernel: that of `hopper_softmax`, with weights for e4m3.

Weights of e4m3 end at 448, and below 2**-6 they lose bits. The maximum that a row's reference was made from has the
weight 2**5, so a row's maximum may become 14 times as large before its reference has to move; what it costs is that
weights of less than 2**-11 of the maximum lose bits, not 2**-14. The reference moves when four weights of a thread
add up to more than 448: none of them is larger then, and four equal weights just after a move add up to 128.

State of a row as in `hopper_softmax`; the reference is the scaled maximum less 5.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.kernels.hopper_softmax import step_assembly, step_constraints

__all__ = ["fp8_softmax_step"]

_LIMIT = "0f43E00000"
# Less 5: see above.
_REFERENCE = "fma.rn.f32 {0}, {0}, scale, 0fC0A00000;"
# Scores of a thread in a tile of 128 keys.
_COUNT = 64


def _weights() -> list[str]:
    """Weights in words of four, for `step_assembly`: a word has the same column of four blocks of eight."""
    lines = ["{ .reg .f32 w2, w3; .reg .b16 low, high;"]
    for first in range(0, _COUNT, 16):
        for row in (0, 1):
            for odd in (0, 1):
                place = first + 2 * row + odd
                for i in range(4):
                    lines.append(
                        f"fma.rn.f32 w{i}, $score{place + 4 * i}, scale, n{row}; ex2.approx.ftz.f32 w{i}, w{i};"
                    )
                lines.append("cvt.rn.satfinite.e4m3x2.f32 low, w1, w0; cvt.rn.satfinite.e4m3x2.f32 high, w3, w2;")
                lines.append(f"mov.b32 $pair{place}, {{low, high}};")
                lines.append("add.f32 w0, w0, w1; add.f32 w2, w2, w3; add.f32 w0, w0, w2;")
                total = f"s{row}{odd}"
                lines.append(f"add.f32 {total}, {total}, w0;" if first else f"mov.f32 {total}, w0;")
                more = first or odd
                lines.append(f"max.NaN.f32 u{row}, u{row}, w0;" if more else f"mov.f32 u{row}, w0;")
    return [*lines, "}"]


# By whether the tile is a row's first.
_STEP = gl.constexpr(
    tuple(
        step_assembly(_COUNT, first=first, weights=_weights(), reference=_REFERENCE, verdict="", limit=_LIMIT)
        for first in (False, True)
    )
)
_CONSTRAINTS = gl.constexpr(step_constraints(_COUNT))


@gluon.jit
def fp8_softmax_step(s, state, FIRST: gl.constexpr):
    """The weights of a tile of raw scores, and the rows' state after it; masked scores are -inf.

    Weights are rounded to e4m3, four to an integer, with the keys in the order of `transpose_values`; their sums are
    of the weights before that. Of a row of the products, a thread has the columns 8 * i + 2 * t + (0, 1), t from 0 to
    3; of a left operand it gives the columns 16 * i + 4 * t + (0, 1, 2, 3). In that order of keys these are the same
    weights: none moves to another thread.

    Returns:
        (weights `[64, 32]`, state).
    """
    words, state = gl.inline_asm_elementwise(
        _STEP[FIRST], _CONSTRAINTS, [s, state], dtype=(gl.int32, gl.float32), is_pure=False, pack=64
    )
    # Axes: row; bits 5-6, 4, 3, 1-2 and 0 of the key. The words lie where bits 3 and 4 are 0.
    words = words.reshape([64, 4, 2, 2, 4, 2]).permute((0, 1, 5, 4, 2, 3)).reshape([64, 32, 2, 2])
    words, _ = gl.split(words)
    words, _ = gl.split(words)
    return words, state
