"""The norm of rows: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_norm_kernel(
    x,
    weight,
    bias,
    out,
    x_row_stride,
    num_weights,
    epsilon,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTER: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ADD_ONE: tl.constexpr,
):
    """Grid: (rows,). The row is in registers; its sum has one tree, which the number of features decides."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < FEATURES
    wide = tl.load(x + row.to(tl.int64) * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / FEATURES, 0.0)
    wide = wide * tl.math.rsqrt(tl.sum(wide * wide, 0) / FEATURES + epsilon)
    place = row % num_weights * FEATURES + columns
    factor = tl.load(weight + place, mask=inside, other=0.0)
    if ROUND_FIRST:
        result = (wide.to(out.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)).to(out.dtype.element_ty)
    else:
        factor = factor.to(tl.float32)
        wide = wide * (1.0 + factor) if ADD_ONE else wide * factor
        if bias is not None:
            wide += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        result = wide.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * FEATURES + columns, result, mask=inside)
