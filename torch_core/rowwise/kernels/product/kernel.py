"""The product of rows and a kernel: one chain of additions along the inputs, whatever the tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_product_kernel(
    x,
    kernel,
    out,
    num_rows,
    x_row_stride,
    kernel_in_stride,
    kernel_out_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS_FIRST: tl.constexpr,
):
    """Grid: (tiles of rows times tiles of outputs,). GROUP tiles of rows run side by side, for the L2 cache.

    A product adds BLOCK_K inputs after the other to one accumulator, in the order of the inputs. Tiles of any size
    multiply by the same instruction of the matrix units, so that a row's sums do not depend on the size. With
    OUTPUTS_FIRST the outputs are the instruction's 64 rows and the rows its columns, of which there may be 16.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    COLUMN_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    first_tile = program // (GROUP * COLUMN_TILES) * GROUP
    size = tl.minimum(row_tiles - first_tile, GROUP)
    inside = program % (GROUP * COLUMN_TILES)
    rows = (first_tile + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = inside // size * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    left = x + rows.to(tl.int64)[:, None] * x_row_stride + steps[None, :]
    right = kernel + steps[:, None].to(tl.int64) * kernel_in_stride + columns[None, :].to(tl.int64) * kernel_out_stride
    EVEN: tl.constexpr = IN % BLOCK_K == 0 and OUT % BLOCK_N == 0
    total = tl.zeros([BLOCK_N, BLOCK_M] if OUTPUTS_FIRST else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        if EVEN:
            # No row is read in place of those behind the last: programs in step would wait for its one cache line.
            a = tl.load(left, mask=is_row, other=0.0)
            b = tl.load(right)
        else:
            is_input = start + steps < IN
            a = tl.load(left, mask=is_row & is_input[None, :], other=0.0)
            b = tl.load(right, mask=is_input[:, None] & (columns < OUT)[None, :], other=0.0)
        if OUTPUTS_FIRST:
            total = tl.dot(tl.trans(b), tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * kernel_in_stride
    if OUTPUTS_FIRST:
        total = tl.trans(total)
    target = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row & (columns < OUT)[None, :])
