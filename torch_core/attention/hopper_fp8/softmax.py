"""The online softmax of the fp8 Hopper prefill kernel: a thread's share of a tile in one piece of assembly.

As in `hopper.softmax`, the weights of a tile are worked out with the row's reference from the tiles before, so that no
maximum is waited for. What says whether that was right is the weights' bytes: none of them may be the largest that e4m3
has, or it may stand for anything above. Otherwise, which is rare after a row's first tile, the warp seeks the maxima,
moves the references of the rows that went beyond, and works the weights out once more.

A reference is such that the largest weight of the tile where it was set is 2 ** _TOP: what grows later by less than
e4m3's 448 over that stays. Sums are of the weights before they are rounded.

State of a row, in the float32 registers of a tensor of the scores' shape, see `hopper.softmax`.
"""

from __future__ import annotations

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_core.attention.hopper.softmax import FACTOR, MOVED, REFERENCE, SCALE, SUMS, row_maxima, row_shifts

__all__ = ["MARK", "fp8_softmax_step"]

_COUNT = 64
_TOP = 7
# From here on a weight is rounded to 448, the largest number of e4m3, whose byte is 0x7e; that of NaN is 0x7f.
_LIMIT = "0f43D80000"
#: What is added to words: it carries into the top bits of the largest bytes. Whoever multiplies takes it off again, in
#: registers of its own: those of weights that are still being multiplied must not be written.
MARK = 0x02020202
_TOP_BITS, _ONE, _ZERO, _NOTHING = "0f40E00000", "0f3F800000", "0f00000000", "0fFF800000"


def _weights(check: bool) -> list[str]:
    """Words of four weights, keys 8 apart, plus MARK; with `check`, `over` has top bits where one is the largest."""
    lines = []
    for word in range(_COUNT // 4):
        odd, row, part = word % 2, word // 2 % 2, word // 4
        for i in range(4):
            score = 4 * (4 * part + i) + 2 * row + odd
            lines.append(f"fma.rn.f32 w{i}, $score{score}, scale, n{row}; ex2.approx.ftz.f32 w{i}, w{i};")
            lines.append(f"add.f32 s{row}{odd}, s{row}{odd}, w{i};" if part + i else f"mov.f32 s{row}{odd}, w{i};")
        lines.append(
            "cvt.rn.satfinite.e4m3x2.f32 low, w1, w0; cvt.rn.satfinite.e4m3x2.f32 high, w3, w2; "
            f"mov.b32 word, {{low, high}}; add.u32 $word{word}, word, {MARK};"
        )
        if check:
            lines.append(f"or.b32 over, over, $word{word};" if word else f"mov.b32 over, $word{word};")
    return lines


def _assembly(first: bool) -> str:
    lines = [f"mov.f32 scale, $in{SCALE}; mov.f32 moved, {_ZERO}; mov.f32 f0, {_ONE}; mov.f32 f1, {_ONE};"]
    if first:
        lines += row_maxima(_COUNT)
        lines += [f"sub.f32 r{row}, t{row}, {_TOP_BITS};" for row in (0, 1)]
        lines += [*row_shifts(), *_weights(False)]
    else:
        lines += [f"mov.f32 r{row}, $in{REFERENCE[row]}; neg.f32 n{row}, r{row};" for row in (0, 1)]
        lines += _weights(True)
        lines.append(
            "and.b32 over, over, 0x80808080; setp.ne.b32 q, over, 0; vote.sync.any.pred q, q, 0xffffffff; "
            "@!q bra.uni settled;"
        )
        lines += row_maxima(_COUNT)
        for row in (0, 1):
            # Unordered comparisons move the rows that have seen no key yet.
            lines.append(
                f"sub.f32 c0, t{row}, r{row}; ex2.approx.ftz.f32 c0, c0; setp.geu.f32 p, c0, {_LIMIT}; "
                f"sub.f32 c1, t{row}, {_TOP_BITS}; sub.f32 c0, r{row}, c1; ex2.approx.ftz.f32 c0, c0; "
                f"setp.gt.and.f32 q, r{row}, {_NOTHING}, p; selp.f32 f{row}, c0, {_ONE}, q; @p mov.f32 r{row}, c1;"
            )
        lines += [*row_shifts(), *_weights(False), f"mov.f32 moved, {_ONE};", "settled:"]
    for row in (0, 1):
        lines.append(f"mov.f32 $out{REFERENCE[row]}, r{row}; mov.f32 $out{FACTOR[row]}, f{row};")
        for odd, place in enumerate(SUMS[row]):
            add = f"fma.rn.f32 $out{place}, $in{place}, f{row}, s{row}{odd};"
            lines.append(f"mov.f32 $out{place}, s{row}{odd};" if first else add)
    lines.append(f"mov.f32 $out{MOVED}, moved; mov.f32 $out{SCALE}, scale;")
    registers = (
        ".reg .f32 scale, moved, w<4>, r<2>, f<2>, n<2>, t<2>, c<4>, s00, s01, s10, s11; "
        ".reg .b32 word, over; .reg .b16 low, high;"
    )
    text = f"{{ {registers} .reg .pred p, q; {' '.join(lines)} }}"
    # Operands: words and state out, scores and state in.
    for name, offset in (("word", 0), ("out", _COUNT), ("score", 2 * _COUNT), ("in", 3 * _COUNT)):
        text = re.sub(rf"\${name}(\d+)", lambda found, offset=offset: f"${offset + int(found[1])}", text)
    return text


# By whether the tile is a row's first.
_STEPS = gl.constexpr(tuple(_assembly(first) for first in (False, True)))
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * _COUNT + ["=&f"] * _COUNT + ["f"] * (2 * _COUNT)))


@gluon.jit
def fp8_softmax_step(s, state, FIRST: gl.constexpr):
    """The weights of a tile of 128 raw scores, and the rows' state after it; masked scores are -inf.

    Returns:
        (words of four e4m3 weights plus MARK, `[64, 32]`, state). The keys are in the order of `transpose_values`.
    """
    words, state = gl.inline_asm_elementwise(
        _STEPS[int(FIRST)],
        _CONSTRAINTS,
        [s, state],
        dtype=(gl.int32, gl.float32),
        is_pure=False,
        pack=64,
    )
    # Of a row of the products, a thread has the columns 8 * i + 2 * t + (0, 1), t from 0 to 3; of a left operand it
    # gives the columns 16 * i + 4 * t + (0, 1, 2, 3). In that order of keys these are the same weights.
    words, _ = gl.split(words.reshape([64, 2, 64]).permute((0, 2, 1)))
    words, _ = gl.split(words.reshape([64, 2, 32]).permute((0, 2, 1)))
    return words.reshape([64, 4, 4, 2]).permute((0, 1, 3, 2)).reshape([64, 32]), state
