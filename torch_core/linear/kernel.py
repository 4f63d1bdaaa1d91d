"""One row times a matrix that is read once, with a norm in front and an activation or a sum behind."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.activations import gated

__all__ = ["linear_row_kernel"]


@triton.jit
def linear_row_kernel(
    x,
    norm_weight,
    kernel,
    bias,
    residual,
    out,
    epsilon,
    kernel_row_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`residual + act(norm(x) @ kernel + bias)`. With an ACTIVATION the kernel's columns are gate and up.

    Grid: (tiles of BLOCK_N columns,).

    The norm's factor is one number, so it is taken behind the product: nothing waits for the sum of squares.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < OUT
    read = tl.where(inside, columns, 0) if OUT % BLOCK_N else columns
    steps = tl.arange(0, BLOCK_K)
    weights = kernel + steps[:, None].to(tl.int64) * kernel_row_stride + read[None, :]
    total = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    # Elements are loaded a step ahead by hand: the pipeline takes nothing that is so narrow, and would wait for it.
    ahead = tl.load(x + steps, mask=steps < IN, other=0.0)
    if norm_weight is not None:
        ahead_weight = tl.load(norm_weight + steps, mask=steps < IN, other=0.0)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        value = ahead.to(tl.float32)
        following = start + BLOCK_K + steps
        ahead = tl.load(x + following, mask=following < IN, other=0.0)
        if norm_weight is not None:
            squares += value * value
            value *= ahead_weight.to(tl.float32)
            ahead_weight = tl.load(norm_weight + following, mask=following < IN, other=0.0)
        if IN % BLOCK_K == 0:
            left = tl.load(weights)
        else:
            left = tl.load(weights, mask=(start + steps < IN)[:, None], other=0.0)
        total += value[:, None] * left.to(tl.float32)
        if ACTIVATION is not None:
            if IN % BLOCK_K == 0:
                right = tl.load(weights + OUT)
            else:
                right = tl.load(weights + OUT, mask=(start + steps < IN)[:, None], other=0.0)
            total_up += value[:, None] * right.to(tl.float32)
        weights += BLOCK_K * kernel_row_stride
    result = tl.sum(total, 0)
    factor = 1.0
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / IN + epsilon)
        result *= factor
    if bias is not None:
        result += tl.load(bias + read).to(tl.float32)
    if ACTIVATION is not None:
        up = tl.sum(total_up, 0) * factor
        if bias is not None:
            up += tl.load(bias + OUT + read).to(tl.float32)
        result = gated(result, up, ACTIVATION)
    if residual is not None:
        result = result.to(x.dtype.element_ty).to(tl.float32) + tl.load(residual + read).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=inside)
