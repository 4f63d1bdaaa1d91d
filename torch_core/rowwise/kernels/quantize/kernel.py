"""Rows as e4m3 numbers with a scale each, after a gated activation, or a sum and a norm: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.quantize import saturate_to

# The reciprocal of the slope of GELU by tanh: 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u.
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
        chunk = _scaled(source, factor, column_scale, own, inside, rounded)
        if ACTIVATION is not None:
            up = _scaled(source + FEATURES, factor, column_scale, own + FEATURES, inside, rounded)
            wide = chunk.to(tl.float32)
            slope = wide
            if ACTIVATION != "silu":
                slope = _GELU_SLOPE * (wide + 0.044715 * wide * wide * wide)
            chunk = (wide * tl.sigmoid(slope) * up.to(tl.float32)).to(rounded)
        if residual is not None:
            before = tl.load(residual + place * residual_row_stride + own, mask=inside, other=0.0)
            chunk = (before.to(tl.float32) + chunk.to(tl.float32)).to(rounded)
        if weight is not None:
            factors = factors + (tl.load(weight + own, mask=inside, other=0.0),)  # noqa: RUF005
            squares += chunk.to(tl.float32) * chunk.to(tl.float32)
        chunks = chunks + (chunk,)  # noqa: RUF005
    largest = tl.zeros([CHUNK], tl.float32)
    inverse_norm = 1.0
    if weight is not None:
        inverse_norm = tl.math.rsqrt(tl.sum(squares, 0) / FEATURES + epsilon)
    normed = ()
    for index in tl.static_range(CHUNKS):
        chunk = chunks[index]
        if residual is not None:
            own = index * CHUNK + columns
            tl.store(stream + place * FEATURES + own, chunk, mask=_inside(own, FEATURES, CHUNK))
        if weight is not None:
            by_column = factors[index].to(tl.float32)
            wide = chunk.to(tl.float32) * inverse_norm
            if ROUND_FIRST:
                wide = wide.to(rounded).to(tl.float32) * by_column
            else:
                wide = wide * (1.0 + by_column) if ADD_ONE else wide * by_column
            chunk = wide.to(rounded)
        largest = _larger(largest, tl.abs(chunk.to(tl.float32)))
        normed = normed + (chunk,)  # noqa: RUF005
    unit = tl.maximum(tl.div_rn(tl.reduce(largest, 0, _larger), 448.0), _SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(1.0, unit)
    for index in tl.static_range(CHUNKS):
        own = index * CHUNK + columns
        wide = normed[index].to(tl.float32)
        # The quotient with a correction is rounded as a division rounds it, which takes twice as long.
        quotient = wide * inverse
        quotient = tl.fma(tl.fma(-quotient, unit, wide), inverse, quotient)
        stored = saturate_to(quotient, tl.float8e4nv)
        tl.store(values + place * FEATURES + own, stored, mask=_inside(own, FEATURES, CHUNK))
    tl.store(scale + row, unit)


@triton.jit
def _inside(columns, FEATURES: tl.constexpr, CHUNK: tl.constexpr):
    """Whether columns are in the row. Where all chunks are, the compiler sees it, which keeps accesses whole."""
    inside = columns >= 0
    if FEATURES % CHUNK != 0:
        inside = columns < FEATURES
    return inside


@triton.jit
def _scaled(source, factor, column_scale, columns, inside, rounded: tl.constexpr):
    """Elements of a row times its factor and those of columns, rounded; the rows are read once, so not to L1."""
    wide = tl.load(source, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * factor
    if column_scale is not None:
        wide = wide * tl.load(column_scale + columns, mask=inside, other=0.0)
    return wide.to(rounded)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
