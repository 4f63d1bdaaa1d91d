"""Kernels that write new keys and values into the paged cache, as they are or quantised."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.kernels.quantize import load_scale, saturate_to, store_value


@triton.jit
def _cache_offset(slot, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    # int64: a slot times its stride passes 2**31 elements in a large pool.
    slot = slot.to(tl.int64)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride


@triton.jit
def write_cache_kernel(
    key_ptr,
    value_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    kv_cache_ptr,
    k_scale,
    v_scale,
    num_tokens,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Writes a tile of TOKENS tokens by COLUMNS (head, element) columns; both loads are issued before the stores."""
    dtype: tl.constexpr = kv_cache_ptr.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = column // HEAD_SIZE
    element = column % HEAD_SIZE
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    mask = ((slot >= 0) & (slot < num_slots))[:, None] & (column < NUM_HEADS * HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    key_offset = (token * key_token_stride)[:, None] + (head * key_head_stride + element)[None, :]
    value_offset = (token * value_token_stride)[:, None] + (head * value_head_stride + element)[None, :]
    key = tl.load(key_ptr + key_offset, mask=mask)
    value = tl.load(value_ptr + value_offset, mask=mask)
    offset = _cache_offset(slot, block_stride, token_stride, BLOCK_SIZE)[:, None]
    offset = offset + (head * head_stride + element)[None, :]
    key = store_value(key, load_scale(k_scale_ptr, k_scale), dtype, HAS_SCALE)
    value = store_value(value, load_scale(v_scale_ptr, v_scale), dtype, HAS_SCALE)
    tl.store(kv_cache_ptr + offset, key, mask=mask)
    tl.store(kv_cache_ptr + offset + value_stride, value, mask=mask)


@triton.jit
def _quantize_rows(x, dtype: tl.constexpr, MAX: tl.constexpr):
    # The floor on the scale keeps a row of zeros finite; vLLM's per-token-head writer uses the same number.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([1], MAX, tl.float32)), 1e-6)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return saturate_to(x, dtype), scale


@triton.jit
def write_cache_per_token_head_kernel(
    key_ptr,
    value_ptr,
    slot_mapping_ptr,
    kv_cache_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    num_tokens,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    k_scale_block_stride,
    k_scale_token_stride,
    k_scale_head_stride,
    v_scale_block_stride,
    v_scale_token_stride,
    v_scale_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Quantises ROWS (token, head) rows with a scale of their own and writes rows and scales."""
    dtype: tl.constexpr = kv_cache_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    element = tl.arange(0, PADDED_HEAD_SIZE)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    mask = live[:, None] & (element < HEAD_SIZE)[None, :]
    key_offset = (token * key_token_stride + head * key_head_stride)[:, None] + element[None, :]
    value_offset = (token * value_token_stride + head * value_head_stride)[:, None] + element[None, :]
    key = tl.load(key_ptr + key_offset, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + value_offset, mask=mask, other=0.0).to(tl.float32)
    key, k_scale = _quantize_rows(key, dtype, MAX)
    value, v_scale = _quantize_rows(value, dtype, MAX)
    offset = _cache_offset(slot, block_stride, token_stride, BLOCK_SIZE) + head * head_stride
    offset = offset[:, None] + element[None, :]
    tl.store(kv_cache_ptr + offset, key, mask=mask)
    tl.store(kv_cache_ptr + offset + value_stride, value, mask=mask)
    k_scale_offset = _cache_offset(slot, k_scale_block_stride, k_scale_token_stride, BLOCK_SIZE)
    v_scale_offset = _cache_offset(slot, v_scale_block_stride, v_scale_token_stride, BLOCK_SIZE)
    tl.store(k_scale_cache_ptr + k_scale_offset + head * k_scale_head_stride, k_scale, mask=live)
    tl.store(v_scale_cache_ptr + v_scale_offset + head * v_scale_head_stride, v_scale, mask=live)
