"""The weighted sum of the results of a token's experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_experts_kernel(
    rows, slots, topk_ids, topk_weights, out, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of BLOCK columns). Rows of ids that are no expert were not written and are not read.

    The row of a pair is its own, or stands in its slot where there are `slots`.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(topk_ids + pair)
        live = inside & (expert >= 0) & (expert < NUM_EXPERTS)
        place = pair
        if slots is not None:
            place = tl.load(slots + pair).to(tl.int64)
        row = tl.load(rows + place * SIZE + columns, mask=live, other=0.0).to(tl.float32)
        total += tl.where(live, tl.load(topk_weights + pair), 0.0) * row
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)
