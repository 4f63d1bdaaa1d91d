"""The log-sum-exp of rows: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_logsumexp_kernel(x, out, x_row_stride, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows,). Each of BLOCK lanes has a softmax of its own, and one tree joins them."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    start = x + row.to(tl.int64) * x_row_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, FEATURES, BLOCK):
        columns = first + lanes
        value = tl.load(start + columns, mask=columns < FEATURES, other=float("-inf"))
        higher = tl.maximum(largest, value)
        # What is infinite is not subtracted: the difference of two infinities is no number.
        shift = tl.where(tl.abs(higher) < float("inf"), higher, 0.0)
        total = total * tl.math.exp2((largest - shift) * LOG2E) + tl.math.exp2((value - shift) * LOG2E)
        largest = higher
    top = tl.max(largest, 0)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    lanes_total = tl.where(largest == float("-inf"), 0.0, total * tl.math.exp2((largest - top) * LOG2E))
    tl.store(out + row, top + tl.math.log2(tl.sum(lanes_total, 0)) * LN2)
