"""One token through its experts: rows of weights times numbers, as fast as they can be read."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.activation import gated


@triton.jit
def one_token_kernel(
    x,
    gate_up_kernel,
    down_kernel,
    gate_up_bias,
    down_bias,
    added,
    topk_ids,
    topk_weights,
    activated,
    partials,
    gate_up_expert_stride,
    gate_up_row_stride,
    down_expert_stride,
    down_row_stride,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (slices of BLOCK_N columns of gate and, if GATED, of up; experts of the token).

    The result of a slice is multiplied by its own rows of the second kernel: no program waits for another. `partials`
    is [experts of the token times slices, HIDDEN], already times the experts' weights. `added` is added to the first
    product of each expert, and `activated` gets the inputs of the second one.
    """
    place, part = tl.program_id(1), tl.program_id(0)
    columns = part * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < INNER
    lanes = tl.arange(0, BLOCK_H)
    stored = lanes < HIDDEN
    target = partials + (place * tl.num_programs(0) + part) * HIDDEN + lanes
    expert = tl.load(topk_ids + place)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        own = expert.to(tl.int64)
        weight = tl.load(topk_weights + place)
        steps = tl.arange(0, BLOCK_K)
        read = tl.where(inside, columns, 0) if INNER % BLOCK_N else columns
        weights = gate_up_kernel + own * gate_up_expert_stride
        weights = weights + steps[:, None].to(tl.int64) * gate_up_row_stride + read[None, :]
        gate = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        # Elements are loaded a step ahead by hand: the pipeline takes nothing that is so narrow, and would wait for it.
        ahead = tl.load(x + steps, mask=steps < HIDDEN, other=0.0)
        for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
            value = ahead.to(tl.float32)[:, None]
            following = start + BLOCK_K + steps
            ahead = tl.load(x + following, mask=following < HIDDEN, other=0.0)
            if HIDDEN % BLOCK_K == 0:
                left = tl.load(weights)
                if GATED:
                    right = tl.load(weights + INNER)
            else:
                live = start + steps < HIDDEN
                left = tl.load(weights, mask=live[:, None], other=0.0)
                if GATED:
                    right = tl.load(weights + INNER, mask=live[:, None], other=0.0)
            gate += value * left.to(tl.float32)
            if GATED:
                up += value * right.to(tl.float32)
            weights += BLOCK_K * gate_up_row_stride
        gate_sum, up_sum = tl.sum(gate, 0), tl.sum(up, 0)
        if gate_up_bias is not None:
            biases = gate_up_bias + own * (2 * INNER if GATED else INNER) + read
            gate_sum += tl.load(biases).to(tl.float32)
            if GATED:
                up_sum += tl.load(biases + INNER).to(tl.float32)
        if added is not None:
            own_row = added + place * (2 * INNER if GATED else INNER) + read
            gate_sum += tl.load(own_row).to(tl.float32)
            if GATED:
                up_sum += tl.load(own_row + INNER).to(tl.float32)
        factor = gated(gate_sum, up_sum if GATED else 1.0, ACTIVATION)
        if activated is not None:
            tl.store(activated + place * INNER + columns, factor.to(activated.dtype.element_ty), mask=inside)
        factor *= weight
        if INNER % BLOCK_N:
            factor = tl.where(inside, factor, 0.0)
        few, slice_rows = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
        first = part * BLOCK_N + few
        rows = down_kernel + own * down_expert_stride + first[:, None].to(tl.int64) * down_row_stride + lanes[None, :]
        total = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        # Whole rows: were they cut, all programs would read the same columns at a time, and so few memory channels.
        for start in tl.range(0, BLOCK_N, BLOCK_R, num_stages=STAGES):
            is_own = (start + few)[:, None] == slice_rows[None, :]
            value = tl.sum(tl.where(is_own, factor[None, :], 0.0), 1)
            right = tl.load(rows, mask=(first + start < INNER)[:, None] & stored[None, :], other=0.0)
            total += value[:, None] * right.to(tl.float32)
            rows += BLOCK_R * down_row_stride
        result = tl.sum(total, 0)
        if down_bias is not None:
            biases = tl.load(down_bias + own * HIDDEN + lanes, mask=stored & (part == 0), other=0.0)
            result += weight * biases.to(tl.float32)
        tl.store(target, result, mask=stored)
    else:
        tl.store(target, tl.zeros([BLOCK_H], tl.float32), mask=stored)


@triton.jit
def sum_partials_kernel(
    partials, out, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Grid: (tiles of BLOCK_N columns,). `out` gets the sum of the PARTS rows of `partials`, always in one order."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    parts = tl.arange(0, BLOCK_P)
    read = (parts < PARTS)[:, None] & (columns < SIZE)[None, :]
    rows = tl.load(partials + parts[:, None] * SIZE + columns[None, :], mask=read, other=0.0)
    tl.store(out + columns, tl.sum(rows, 0).to(out.dtype.element_ty), mask=columns < SIZE)
