"""Rows as e4m3 numbers with a scale each, after a gated activation, or a sum and a norm: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl

# Twice the square root of 2 / pi: 0.5 * (1 + tanh(u)) of GELU is the sigmoid of 2 * u.
_GELU_SLOPE = tl.constexpr(1.5957691216057308)
# The least scale, of rows of zeros: the smallest normal number.
_SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def row_quantize_kernel(
    x,
    row_scale,
    column_scale,
    residual,
    weight,
    values,
    scale,
    stream,
    x_row_stride,
    residual_row_stride,
    epsilon,
    FEATURES: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ADD_ONE: tl.constexpr,
):
    """Grid: (rows,). The row is in registers, in chunks of columns; its sum has one tree for a number of features."""
    rounded: tl.constexpr = x.dtype.element_ty if residual is None else residual.dtype.element_ty
    CHUNKS: tl.constexpr = (FEATURES + CHUNK - 1) // CHUNK
    row = tl.program_id(0)
    place = row.to(tl.int64)
    columns = tl.arange(0, CHUNK)
    factor = 1.0
    if row_scale is not None:
        factor = tl.load(row_scale + row)
    # Nothing is stored until all is loaded: the compiler does not move a load before a store.
    chunks = ()
    factors = ()
    squares = tl.zeros([CHUNK], tl.float32)
    for index in tl.static_range(CHUNKS):
        own = index * CHUNK + columns
        inside = _inside(own, FEATURES, CHUNK)
        source = x + place * x_row_stride + own
        wide = _scaled(source, factor, column_scale, own, inside)
        if ACTIVATION is not None:
            up = _scaled(source + FEATURES, factor, column_scale, own + FEATURES, inside)
            slope = wide
            if ACTIVATION != "silu":
                slope = _GELU_SLOPE * (wide + 0.044715 * wide * wide * wide)
            wide = wide * approximate_sigmoid(slope) * up
        if residual is not None:
            before = tl.load(residual + place * residual_row_stride + own, mask=inside, other=0.0)
            wide = (before.to(tl.float32) + wide).to(rounded).to(tl.float32)
        if weight is not None:
            factors = factors + (tl.load(weight + own, mask=inside, other=0.0),)  # noqa: RUF005
            squares += wide * wide
        chunks = chunks + (wide,)  # noqa: RUF005
    inverse_norm = 1.0
    if weight is not None:
        inverse_norm = tl.math.rsqrt(tl.sum(squares, 0) / FEATURES + epsilon)
    largest = tl.zeros([CHUNK], tl.float32)
    normed = ()
    for index in tl.static_range(CHUNKS):
        wide = chunks[index]
        if residual is not None:
            own = index * CHUNK + columns
            tl.store(stream + place * FEATURES + own, wide.to(rounded), mask=_inside(own, FEATURES, CHUNK))
        if weight is not None:
            by_column = factors[index].to(tl.float32)
            wide = wide * inverse_norm
            if ROUND_FIRST:
                wide = wide.to(rounded).to(tl.float32) * by_column
            else:
                wide = wide * (1.0 + by_column) if ADD_ONE else wide * by_column
        largest = _larger(largest, tl.abs(wide))
        normed = normed + (wide,)  # noqa: RUF005
    unit = tl.maximum(tl.div_rn(tl.reduce(largest, 0, _larger), 448.0), _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(1.0, unit)
    for index in tl.static_range(CHUNKS):
        own = index * CHUNK + columns
        # The quotient with a correction is rounded as a division rounds it, which takes twice as long. None is above
        # 448 by more than rounding, so that nothing has to be clamped.
        quotient = normed[index] * inverse
        quotient = tl.fma(tl.fma(-quotient, unit, normed[index]), inverse, quotient)
        target = values + place * FEATURES + own
        tl.store(target, quotient.to(tl.float8e4nv), mask=_inside(own, FEATURES, CHUNK))
    tl.store(scale + row, unit)


@triton.jit
def _inside(columns, FEATURES: tl.constexpr, CHUNK: tl.constexpr):
    """Whether columns are in the row. Where all chunks are, the compiler sees it, which keeps accesses whole."""
    inside = columns >= 0
    if FEATURES % CHUNK != 0:
        inside = columns < FEATURES
    return inside


@triton.jit
def _scaled(source, factor, column_scale, columns, inside):
    """Elements of a row times its factor and those of columns; the rows are read once, so not to L1."""
    wide = tl.load(source, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * factor
    if column_scale is not None:
        wide = wide * tl.load(column_scale + columns, mask=inside, other=0.0)
    return wide


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def approximate_sigmoid(x):
    """The sigmoid with an error of a few units of float32, in 4 instructions in place of 10."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
