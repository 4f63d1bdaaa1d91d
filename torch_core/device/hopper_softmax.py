"""The online softmax of the Hopper prefill kernels: a thread's whole share of a tile in one piece of assembly.

A warp's time goes into exponentials, eight cycles for 32 of them. The usual step before them costs as much: the maximum
of a row, on which four threads have to agree. So the weights of a tile are worked out with the
row's reference from the tiles before, and their sums say whether that was right: as long as a thread's sums stay
below 2^10 no weight is larger, and nothing has to be rescaled (after the conditional rescaling of FlashAttention-4).
Otherwise, which is rare after a row's first tile, the warp seeks the maxima and works the weights out once more.
Whether a row's reference moves depends on that row alone.

State of a row, in the float32 registers of a tensor of the scores' shape; a thread has two rows, eight apart:

    reference   subtracted from scaled scores: the scaled maximum of an earlier tile; -inf before the first key
    factor      the last tile's factor of earlier sums and outputs: 1, unless the reference moved
    moved       1 if the reference of any row of the warp moved in the last tile, 0 otherwise
    sums        sums of the weights of this thread: even and odd columns
    scale       scores to the base-2 exponent
"""

from __future__ import annotations

import re
from collections.abc import Callable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Elements of a thread that one test of `rescale` covers.
_RESCALED = gl.constexpr(32)
# Places in a thread's registers: column bit 0, row + 8, column bit 3, and so on.
REFERENCE, _FACTOR, _MOVED, _SUMS, _SCALE = (0, 2), (4, 6), 5, ((8, 9), (10, 11)), 12
ZERO, ONE, NOTHING = "0f00000000", "0f3F800000", "0fFF800000"


def step_assembly(
    count: int, first: bool, *, weights: list[str], begin: list[str], move: Callable[[int], str], limit: str,
    registers: str,
) -> str:  # fmt: skip
    """The assembly of a step: words of weights and the state out, scores and the state in.

    Its registers, for each row: r its reference, n minus that, t the maximum, f the factor of earlier sums, u and
    s<row><odd> sums of weights; c for anything.

    A thread has `count` scores. Lines of `weights` turn the scores $score0, ... into the words $word0, ... and their
    sums, in `registers` of their own; `begin` sets the references of a row's `first` tile, and move(row) moves a row's
    if its sums are beyond `limit`.
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


def _rescale_assembly(count: int) -> str:
    # Operands: `count` values in and out, the same again (tied), `count` factors, `count` times whether they moved; in
    # the order of the matrix units: two columns of one row, the same columns of the row 8 below, and so on.
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i // 2 % 2 * 2}; " for i in range(count))
    return (
        f"{{ .reg .pred moved; setp.neu.f32 moved, ${3 * count}, 0f00000000; @!moved bra.uni same; {products}same: }}"
    )


_RESCALE = gl.constexpr(_rescale_assembly(_RESCALED.value))
_RESCALE_CONSTRAINTS = gl.constexpr(
    ",".join(["=f"] * _RESCALED.value + [str(i) for i in range(_RESCALED.value)] + ["f"] * (2 * _RESCALED.value))
)


@gluon.jit
def row_sums(state):
    """The sum of the weights of every row, `[64]`."""
    return gl.sum(_place(state, 4) + _place(state, 5), 1)


@gluon.jit
def row_references(state):
    """The reference of every row, `[64]`."""
    return gl.max(_place(state, 0), 1)


@gluon.jit
def rescale(acc, state):
    """acc times the factors of the last tile, which a warp skips unless the reference of one of its rows moved."""
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_CONSTRAINTS, [acc, _spread(_place(state, 2), acc), _spread(_place(state, 3), acc)],
        dtype=gl.float32, is_pure=True, pack=_RESCALED,
    )  # fmt: skip


@gluon.jit
def _place(state, INDEX: gl.constexpr):
    """`[64, 4]`: the values that the four threads of a row have in column INDEX of theirs."""
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
