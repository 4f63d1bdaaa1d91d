"""The kernel that copies whole blocks inside one array (copy-on-write)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(
    block_mapping,
    kv_cache,
    num_blocks,
    block_stride,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SIZE_3: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copies ELEMENTS elements of one (source, target) pair; a pair with an id outside the pool is skipped."""
    pair = tl.program_id(0)
    source = tl.load(block_mapping + 2 * pair).to(tl.int64)
    target = tl.load(block_mapping + 2 * pair + 1).to(tl.int64)
    if (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks):
        index = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
        mask = index < SIZE_0 * SIZE_1 * SIZE_2 * SIZE_3
        row = index // SIZE_3
        offset = (
            (row // (SIZE_2 * SIZE_1)) * stride_0
            + ((row // SIZE_2) % SIZE_1) * stride_1
            + (row % SIZE_2) * stride_2
            + (index % SIZE_3) * stride_3
        )
        block = tl.load(kv_cache + source * block_stride + offset, mask=mask)
        tl.store(kv_cache + target * block_stride + offset, block, mask=mask)
