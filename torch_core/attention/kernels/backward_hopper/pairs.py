"""Weights and their gradients in pairs of 16 bits, as the matrix units take them: a register holds two columns.

The language's own 16-bit tensors take a register for each element until they are used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["load_pairs", "score_gradient_pairs", "unpack_pairs", "weight_pairs"]

_WEIGHTS = "{{ .reg .f32 a, b; ex2.approx.ftz.f32 a, $1; ex2.approx.ftz.f32 b, $2; cvt.rn.{0}x2.f32 $0, b, a; }}"
_FLOATS = (
    "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;",
    "{ .reg .b16 h, i; mov.b32 {h, i}, $1; cvt.f32.f16 a, h; cvt.f32.f16 b, i; }",
)
_GRADIENT = "{{ .reg .b32 a, b; {1} mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.{0}x2.f32 $0, b, a; }}"
_KINDS = ("bf16", "f16")
# By whether elements are float16.
_WEIGHT_STEP = gl.constexpr(tuple(_WEIGHTS.format(kind) for kind in _KINDS))
_GRADIENT_STEP = gl.constexpr(
    tuple(_GRADIENT.format(kind, floats) for kind, floats in zip(_KINDS, _FLOATS, strict=True))
)


@gluon.jit
def weight_pairs(exponents, DTYPE: gl.constexpr):
    """Pairs of 2 ** exponents, `[rows, columns // 2]` int32."""
    kind: gl.constexpr = int(gl.float16 == DTYPE)
    even, odd = _columns(exponents)
    return gl.inline_asm_elementwise(_WEIGHT_STEP[kind], "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def score_gradient_pairs(weights, x, DTYPE: gl.constexpr):
    """Pairs of the products of pairs of weights with x, a float32 tensor."""
    kind: gl.constexpr = int(gl.float16 == DTYPE)
    even, odd = _columns(x)
    return gl.inline_asm_elementwise(
        _GRADIENT_STEP[kind], "=r,r,f,f", [weights, even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pairs(pairs, DTYPE: gl.constexpr):
    """The 16-bit tensor `[rows, columns]` of pairs."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]]).to(DTYPE, bitcast=True)


@gluon.jit
def load_pairs(tile, x):
    """Loads pairs from shared memory as the threads have them that have the columns of x."""
    even, _ = _columns(x)
    return tile.load(even.type.layout)


@gluon.jit
def _columns(x):
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
