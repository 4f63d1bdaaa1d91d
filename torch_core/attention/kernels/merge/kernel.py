"""The kernel that merges two partial attention results over disjoint sets of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.quantize import load_scale, saturate_to


@triton.jit
def merge_states_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out_scale,
    out,
    lse,
    out_scale_value,
    num_rows,
    num_tokens_a,
    out_a_token_stride,
    out_a_head_stride,
    out_b_token_stride,
    out_b_head_stride,
    lse_a_token_stride,
    lse_a_head_stride,
    lse_b_token_stride,
    lse_b_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Merges ROWS (token, head) rows; tokens from `num_tokens_a` on have no first state."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    live = row < num_rows
    element = tl.arange(0, PADDED_HEAD_SIZE)
    mask = live[:, None] & (element < HEAD_SIZE)[None, :]
    lse_a_offset = token * lse_a_token_stride + head * lse_a_head_stride
    lse_b_offset = token * lse_b_token_stride + head * lse_b_head_stride
    a = tl.load(lse_a + lse_a_offset, mask=live & (token < num_tokens_a), other=float("-inf"))
    b = tl.load(lse_b + lse_b_offset, mask=live, other=float("-inf"))
    # FlashAttention-2 reports +inf for a row without keys, FlashAttention-3 -inf (vLLM pull request 15492).
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(a - base)
    weight_b = tl.exp(b - base)
    total = weight_a + weight_b
    merged_lse = tl.where(total == 0.0, float("-inf"), base + tl.log(total))
    divisor = tl.where(total == 0.0, 1.0, total)
    # The rows of an empty state are not read: zero times NaN would still be NaN.
    out_a_offset = (token * out_a_token_stride + head * out_a_head_stride)[:, None] + element[None, :]
    out_b_offset = (token * out_b_token_stride + head * out_b_head_stride)[:, None] + element[None, :]
    rows_a = tl.load(out_a + out_a_offset, mask=mask & (weight_a > 0.0)[:, None], other=0.0).to(tl.float32)
    rows_b = tl.load(out_b + out_b_offset, mask=mask & (weight_b > 0.0)[:, None], other=0.0).to(tl.float32)
    merged = rows_a * (weight_a / divisor)[:, None] + rows_b * (weight_b / divisor)[:, None]
    if HAS_SCALE:
        merged = tl.div_rn(merged, tl.broadcast_to(load_scale(out_scale, out_scale_value), merged.shape))
    out_offset = (token * out_token_stride + head * out_head_stride)[:, None] + element[None, :]
    tl.store(out + out_offset, saturate_to(merged, out.dtype.element_ty), mask=mask)
    tl.store(lse + token * lse_token_stride + head * lse_head_stride, merged_lse, mask=live)
