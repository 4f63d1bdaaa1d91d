"""One token through its experts: rows of weights times numbers, as fast as they can be read."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.experts.kernel import gated

__all__ = ["one_token_down_kernel", "one_token_gate_kernel"]


@triton.jit
def one_token_gate_kernel(
    x,
    kernel,
    bias,
    topk_ids,
    out,
    kernel_expert_stride,
    kernel_row_stride,
    NUM_EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (tiles of BLOCK_N columns, experts of the token). `out` is [experts of the token, OUT]."""
    place = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < OUT
    expert = tl.load(topk_ids + place)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        steps = tl.arange(0, BLOCK_K)
        read = tl.where(inside, columns, 0) if OUT % BLOCK_N else columns
        weights = kernel + expert.to(tl.int64) * kernel_expert_stride
        weights = weights + steps[:, None].to(tl.int64) * kernel_row_stride + read[None, :]
        gate = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        # Elements are loaded a step ahead by hand: the pipeline takes nothing that is so narrow, and would wait for it.
        ahead = tl.load(x + steps, mask=steps < IN, other=0.0)
        for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
            value = ahead.to(tl.float32)[:, None]
            following = start + BLOCK_K + steps
            ahead = tl.load(x + following, mask=following < IN, other=0.0)
            if IN % BLOCK_K == 0:
                left, right = tl.load(weights), tl.load(weights + OUT)
            else:
                live = start + steps < IN
                left = tl.load(weights, mask=live[:, None], other=0.0)
                right = tl.load(weights + OUT, mask=live[:, None], other=0.0)
            gate += value * left.to(tl.float32)
            up += value * right.to(tl.float32)
            weights += BLOCK_K * kernel_row_stride
        gate_sum, up_sum = tl.sum(gate, 0), tl.sum(up, 0)
        if bias is not None:
            added = bias + expert.to(tl.int64) * (2 * OUT) + read
            gate_sum += tl.load(added).to(tl.float32)
            up_sum += tl.load(added + OUT).to(tl.float32)
        result = gated(gate_sum, up_sum, ACTIVATION)
        tl.store(out + place * OUT + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def one_token_down_kernel(
    x,
    kernel,
    bias,
    topk_ids,
    topk_weights,
    out,
    kernel_expert_stride,
    kernel_row_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (tiles of BLOCK_N columns,). A step has BLOCK_K rows of every expert of the token, times their weights."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < OUT
    read = tl.where(inside, columns, 0) if OUT % BLOCK_N else columns
    rows = tl.arange(0, BLOCK_TOP * BLOCK_K)
    place, steps = rows // BLOCK_K, rows % BLOCK_K
    expert = tl.load(topk_ids + place, mask=place < TOP_K, other=-1)
    live = (expert >= 0) & (expert < NUM_EXPERTS)
    factor = tl.load(topk_weights + place, mask=live, other=0.0)
    values = x + place * IN + steps
    weights = kernel + (tl.where(live, expert, 0).to(tl.int64) * kernel_expert_stride)[:, None]
    weights = weights + steps[:, None].to(tl.int64) * kernel_row_stride + read[None, :]
    total = tl.zeros([BLOCK_TOP * BLOCK_K, BLOCK_N], tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        own = live if IN % BLOCK_K == 0 else live & (start + steps < IN)
        value = tl.load(values + start, mask=own, other=0.0) * factor
        right = tl.load(weights, mask=own[:, None], other=0.0)
        total += value[:, None] * right.to(tl.float32)
        weights += BLOCK_K * kernel_row_stride
    result = tl.sum(total, 0)
    if bias is not None:
        places = tl.arange(0, BLOCK_TOP)
        experts = tl.load(topk_ids + places, mask=places < TOP_K, other=-1)
        real = (experts >= 0) & (experts < NUM_EXPERTS)
        added = bias + tl.where(real, experts, 0).to(tl.int64)[:, None] * OUT + read[None, :]
        shares = tl.load(topk_weights + places, mask=real, other=0.0)
        added = tl.load(added, mask=real[:, None], other=0.0).to(tl.float32)
        result += tl.sum(shares[:, None] * added, 0)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=inside)
