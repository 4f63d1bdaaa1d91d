"""The online softmax of the Hopper prefill kernel: a thread's whole share of a tile in one piece of assembly.

A warp's time goes into exponentials, eight cycles for 32 of them, and what usually comes before them costs as much
again: the maximum of a row, on which four threads have to agree. So the weights of a tile are worked out with the
row's reference from the tiles before, and their sums say whether that was right: as long as a thread's sums stay
below 2^10 no weight is larger, and nothing has to be rescaled (after the conditional rescaling of FlashAttention-4).
Otherwise, which is rare after a row's first tile, the warp seeks the maxima and works the weights out once more.
Whether a row's reference moves depends on that row alone.

State of a row, in the float32 registers of a tensor of the scores' shape; a thread has two rows, eight apart:

    reference   what is subtracted from scaled scores: the scaled maximum of some tile; -inf before the first key
    factor      what the last tile did to the sums and the output so far: 1, unless the reference moved
    moved       1 if the reference of any row of the warp moved in the last tile, 0 otherwise
    sums        sums of the weights of this thread: even and odd columns
    scale       scores to the base-2 exponent
"""

from __future__ import annotations

import re
from collections.abc import Callable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "NOTHING",
    "ONE",
    "REFERENCE",
    "initial_state",
    "rescale",
    "row_factors",
    "row_references",
    "row_sums",
    "softmax_step",
    "step_assembly",
    "step_constraints",
    "unpack_weights",
]

# Elements of a thread that one test of `rescale` covers.
_RESCALED = gl.constexpr(32)
# Places in a thread's registers: column bit 0, row + 8, column bit 3, and so on.
REFERENCE, _FACTOR, _MOVED, _SUMS, _SCALE = (0, 2), (4, 6), 5, ((8, 9), (10, 11)), 12
# Sums beyond it move the reference; weights must stay below the largest float16 too.
_LIMIT = "0f44800000"
ZERO, ONE, NOTHING = "0f00000000", "0f3F800000", "0fFF800000"


def step_assembly(
    count: int, first: bool, *, weights: list[str], begin: list[str], move: Callable[[int], str], limit: str,
    registers: str,
) -> str:  # fmt: skip
    """The assembly of a step: words of weights and the state out, scores and the state in.

    Its registers, for each row: r its reference, n minus that, t the maximum, f what happens to earlier sums, u and
    s<row><odd> sums of weights; c for anything.

    Args:
        count: scores of a thread.
        first: the tile is a row's first.
        weights: lines that make the words $word0, ... of weights out of the scores $score0, ..., and their sums.
        begin: lines that set the references of a row's first tile.
        move: for a row, the lines that move its reference if its sums are beyond `limit`.
        limit: sums beyond it move a reference.
        registers: declarations of others that `weights` uses.
    """
    lines = [f"mov.f32 scale, $in{_SCALE}; mov.f32 moved, {ZERO}; mov.f32 f0, {ONE}; mov.f32 f1, {ONE};"]
    if first:
        lines += [*_row_maxima(count), *begin, *_row_shifts(), *weights]
    else:
        lines += [f"mov.f32 r{row}, $in{REFERENCE[row]}; neg.f32 n{row}, r{row};" for row in (0, 1)]
        lines += weights
        # A row before its first key has infinite weights here, or NaN: unordered comparisons send it the long way.
        lines.append(
            "max.NaN.f32 u0, s00, s01; max.NaN.f32 u1, s10, s11; max.NaN.f32 c0, u0, u1; "
            f"setp.gtu.f32 q, c0, {limit}; vote.sync.any.pred q, q, 0xffffffff; @!q bra.uni settled;"
        )
        lines += [*_agreed_rows("max.NaN.f32", "u"), *_row_maxima(count), move(0), move(1)]
        lines += [*_row_shifts(), *weights, f"mov.f32 moved, {ONE};", "settled:"]
    for row in (0, 1):
        lines.append(f"mov.f32 $out{REFERENCE[row]}, r{row}; mov.f32 $out{_FACTOR[row]}, f{row};")
        for odd, place in enumerate(_SUMS[row]):
            total = f"s{row}{odd}"
            add = f"fma.rn.f32 $out{place}, $in{place}, f{row}, {total};"
            lines.append(f"mov.f32 $out{place}, {total};" if first else add)
    lines.append(f"mov.f32 $out{_MOVED}, moved; mov.f32 $out{_SCALE}, scale;")
    names = ".reg .f32 scale, moved, r<2>, f<2>, n<2>, t<2>, u<2>, c<4>, s00, s01, s10, s11; .reg .pred p, q;"
    text = f"{{ {names} {registers} {' '.join(lines)} }}"
    for name, offset in (("word", 0), ("out", count), ("score", 2 * count), ("in", 3 * count)):
        text = re.sub(rf"\${name}(\d+)", lambda found, offset=offset: f"${offset + int(found[1])}", text)
    return text


def step_constraints(count: int) -> str:
    """The constraints of `step_assembly`."""
    return ",".join(["=&r"] * count + ["=&f"] * count + ["f"] * (2 * count))


def _row_maxima(count: int) -> list[str]:
    """Scaled maxima t<row> of the scores of two rows."""
    lines = []
    for row in (0, 1):
        scores = [f"$score{4 * column + 2 * row + odd}" for column in range(count // 4) for odd in (0, 1)]
        lines += [f"mov.f32 c{i}, {score};" for i, score in enumerate(scores[:4])]
        lines += [f"max.f32 c{i % 4}, c{i % 4}, {score};" for i, score in enumerate(scores[4:])]
        lines.append(f"max.f32 c0, c0, c1; max.f32 c2, c2, c3; max.f32 t{row}, c0, c2;")
    return [*lines, *_agreed_rows("max.f32", "t"), "mul.f32 t0, t0, scale; mul.f32 t1, t1, scale;"]


def _agreed_rows(operation: str, name: str) -> list[str]:
    """A value for each of two rows, reduced over the four threads that share them."""
    return [
        f"shfl.sync.bfly.b32 c{row}, {name}{row}, {lanes}, 0x1f, 0xffffffff; "
        f"{operation} {name}{row}, {name}{row}, c{row};"
        for lanes in (2, 1)
        for row in (0, 1)
    ]


def _row_shifts() -> list[str]:
    # Rows that have seen no key are shifted by 0: -inf - -inf is NaN.
    return [
        f"setp.gt.f32 q, r{row}, {NOTHING}; neg.f32 n{row}, r{row}; selp.f32 n{row}, n{row}, {ZERO}, q;"
        for row in (0, 1)
    ]


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


def _rescale_assembly(count: int) -> str:
    # Operands: `count` values in and out, the same again (tied), `count` factors, `count` times whether they moved; in
    # the order of the matrix units: two columns of one row, the same columns of the row 8 below, and so on.
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i // 2 % 2 * 2}; " for i in range(count))
    return (
        f"{{ .reg .pred moved; setp.neu.f32 moved, ${3 * count}, 0f00000000; @!moved bra.uni same; {products}same: }}"
    )


_CONVERT = ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
# By whether the weights are float16, and whether the tile is a row's first.
_STEP_64 = gl.constexpr(tuple(_assembly(64, first, convert) for convert in _CONVERT for first in (False, True)))
_STEP_32 = gl.constexpr(tuple(_assembly(32, first, convert) for convert in _CONVERT for first in (False, True)))
_CONSTRAINTS_64 = gl.constexpr(step_constraints(64))
_CONSTRAINTS_32 = gl.constexpr(step_constraints(32))
_RESCALE = gl.constexpr(_rescale_assembly(_RESCALED.value))
_RESCALE_CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * _RESCALED.value + [str(i) for i in range(_RESCALED.value)] + ["f"] * (2 * _RESCALED.value))
)


@gluon.jit
def initial_state(scale, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """The state of rows before their first tile, which needs the scale alone."""
    return gl.full([64, BLOCK_N], 0.0, gl.float32, S_LAYOUT) + scale


@gluon.jit
def softmax_step(s, state, q, FIRST: gl.constexpr):
    """The weights of a tile of raw scores, and the rows' state after it; masked scores are -inf.

    Returns:
        (pairs of 16-bit weights for `unpack_weights`, state).
    """
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


@gluon.jit
def row_sums(state):
    """The sum of the weights of every row, `[64]`."""
    return gl.sum(_place(state, 4) + _place(state, 5), 1)


@gluon.jit
def row_references(state):
    """The reference of every row, `[64]`."""
    return gl.max(_place(state, 0), 1)


@gluon.jit
def row_factors(state, x):
    """What the last tile did to what rows have summed up so far, in the shape and layout of x."""
    return _spread(_place(state, 2), x)


@gluon.jit
def rescale(acc, state):
    """acc times the factors of the last tile, which a warp skips unless the reference of one of its rows moved."""
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_CONSTRAINTS, [acc, row_factors(state, acc), _spread(_place(state, 3), acc)],
        dtype=gl.float32, is_pure=True, pack=_RESCALED,
    )  # fmt: skip


@gluon.jit
def _place(state, INDEX: gl.constexpr):
    """`[64, 4]`: what the four threads of a row have in column INDEX of theirs."""
    N: gl.constexpr = state.shape[1]
    x = state.reshape([64, N // 8, 4, 2]).permute(0, 2, 1, 3).reshape([64, 4, N // 4])
    levels: gl.constexpr = 5 if N == 128 else 4
    for i in gl.static_range(levels):
        even, odd = gl.split(x.reshape([64, 4, x.shape[2] // 2, 2]))
        x = odd if (INDEX >> i) % 2 else even
    return x.reshape([64, 4])


@gluon.jit
def _spread(x, acc):
    """`[64, 4]` over all columns that a thread has of a tile."""
    blocks = acc.reshape([64, acc.shape[1] // 8, 4, 2])
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, blocks.type.layout)))
    x, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(x, 1), 3), blocks)
    return gl.convert_layout(x.reshape([64, acc.shape[1]]), acc.type.layout)
