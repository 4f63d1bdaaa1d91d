"""Few rows times a matrix that is read once, with an activation or a sum behind, and the norm of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.activations import gated

__all__ = ["linear_rows_kernel", "norm_rows_kernel"]


@triton.jit
def linear_rows_kernel(
    x,
    kernel,
    bias,
    residual,
    out,
    num_rows,
    x_row_stride,
    kernel_row_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    COPIED: tl.constexpr,
):
    """`residual + act(x @ kernel + bias)`. With an ACTIVATION the kernel's columns are gate and up.

    Grid: (tiles of BLOCK_N columns,). The kernel's columns are the rows of the product, so that few rows are no padding
    of the matrix units. If COPIED `x` and `kernel` are descriptors, whose tiles the copy engine brings.
    """
    column = tl.program_id(0) * BLOCK_N
    rows, steps = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        if COPIED:
            values = x.load([0, start])
            left = kernel.load([start, column])
        else:
            live = start + steps < IN
            values = tl.load(
                x + rows[:, None] * x_row_stride + (start + steps)[None, :],
                mask=(rows < num_rows)[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            places = kernel + (start + steps)[:, None].to(tl.int64) * kernel_row_stride + columns[None, :]
            inside = live[:, None] & (columns < OUT)[None, :]
            left = tl.load(places, mask=inside, other=0.0)
        total = tl.dot(left.T, values.T, total, input_precision="ieee")
        if ACTIVATION is not None:
            right = kernel.load([start, OUT + column]) if COPIED else tl.load(places + OUT, mask=inside, other=0.0)
            total_up = tl.dot(right.T, values.T, total_up, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        if bias is not None:
            total_up += tl.load(bias + OUT + columns, mask=columns < OUT, other=0.0).to(tl.float32)[:, None]
        total = gated(total, total_up, ACTIVATION)
    written = (columns < OUT)[:, None] & (rows < num_rows)[None, :]
    places = rows[None, :] * OUT + columns[:, None]
    if residual is not None:
        added = tl.load(residual + places, mask=written, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + places, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def norm_rows_kernel(x, weight, out, epsilon, x_row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Divides each row by its root mean square, in float32, and rounds before the weight. Grid: (rows,)."""
    row, elements = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = elements < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    factors = tl.load(weight + elements, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_row_stride + elements, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    tl.store(out + row * SIZE + elements, (values.to(dtype).to(tl.float32) * factors).to(dtype), mask=inside)
