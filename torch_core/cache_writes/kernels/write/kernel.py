"""Kernels that write new keys and values into the paged cache, as they are or quantised."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.dependent import let_next_begin
from torch_core.device.quantize import load_scale, saturate_to, store_value


@triton.jit
def _slot_offset(slot, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    # int64: a slot times its stride passes 2**31 elements in a large pool.
    slot = slot.to(tl.int64)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride


@triton.jit
def _columns(column, head_stride, SIZE: tl.constexpr):
    return (column // SIZE) * head_stride + column % SIZE


@triton.jit
def write_cache_kernel(
    key,
    value,
    slot_mapping,
    k_scale,
    v_scale,
    key_cache,
    value_cache,
    k_scale_value,
    v_scale_value,
    num_tokens,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_cache_block_stride,
    key_cache_token_stride,
    key_cache_head_stride,
    value_cache_block_stride,
    value_cache_token_stride,
    value_cache_head_stride,
    value_offset,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LETS_NEXT: tl.constexpr,
):
    """Writes a tile of TOKENS tokens by COLUMNS (head, element) columns; both loads are issued before the stores.

    Without a value_cache, values lie value_offset elements after the keys of the same slot. With LETS_NEXT the launch
    behind may begin, and waits.
    """
    if LETS_NEXT:
        let_next_begin()
    dtype: tl.constexpr = key_cache.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    live = ((slot >= 0) & (slot < num_slots))[:, None]
    key_mask = live & (column < NUM_HEADS * KEY_SIZE)[None, :]
    value_mask = live & (column < NUM_HEADS * VALUE_SIZE)[None, :]
    token = token.to(tl.int64)
    key_source = (token * key_token_stride)[:, None] + _columns(column, key_head_stride, KEY_SIZE)[None, :]
    value_source = (token * value_token_stride)[:, None] + _columns(column, value_head_stride, VALUE_SIZE)[None, :]
    keys = tl.load(key + key_source, mask=key_mask)
    values = tl.load(value + value_source, mask=value_mask)
    keys = store_value(keys, load_scale(k_scale, k_scale_value), dtype, HAS_SCALE)
    values = store_value(values, load_scale(v_scale, v_scale_value), dtype, HAS_SCALE)
    key_target = _slot_offset(slot, key_cache_block_stride, key_cache_token_stride, BLOCK_SIZE)[:, None]
    value_target = _slot_offset(slot, value_cache_block_stride, value_cache_token_stride, BLOCK_SIZE)[:, None]
    key_target = key_target + _columns(column, key_cache_head_stride, KEY_SIZE)[None, :]
    value_target = value_target + _columns(column, value_cache_head_stride, VALUE_SIZE)[None, :]
    tl.store(key_cache + key_target, keys, mask=key_mask)
    cache = key_cache if value_cache is None else value_cache
    tl.store(cache + value_offset + value_target, values, mask=value_mask)


@triton.jit
def _load_row(pointer, token, head, live, token_stride, head_stride, element, SIZE: tl.constexpr):
    offset = (token * token_stride + head * head_stride)[:, None] + element[None, :]
    return tl.load(pointer + offset, mask=live[:, None] & (element < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _quantize_rows(x, dtype: tl.constexpr, MAX: tl.constexpr):
    # The floor on the scale keeps a row of zeros finite; vLLM's per-token-head writer uses the same number.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([1], MAX, tl.float32)), 1e-6)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return saturate_to(x, dtype), scale


@triton.jit
def write_cache_per_token_head_kernel(
    key,
    value,
    slot_mapping,
    key_cache,
    value_cache,
    k_scale_cache,
    v_scale_cache,
    num_tokens,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_cache_block_stride,
    key_cache_token_stride,
    key_cache_head_stride,
    value_cache_block_stride,
    value_cache_token_stride,
    value_cache_head_stride,
    value_offset,
    k_scale_block_stride,
    k_scale_token_stride,
    k_scale_head_stride,
    v_scale_block_stride,
    v_scale_token_stride,
    v_scale_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Quantises ROWS (token, head) rows with a scale of their own and writes rows and scales."""
    dtype: tl.constexpr = key_cache.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    element = tl.arange(0, PADDED_SIZE)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    keys = _load_row(key, token, head, live, key_token_stride, key_head_stride, element, KEY_SIZE)
    values = _load_row(value, token, head, live, value_token_stride, value_head_stride, element, VALUE_SIZE)
    keys, k_scale = _quantize_rows(keys, dtype, MAX)
    values, v_scale = _quantize_rows(values, dtype, MAX)
    target = _slot_offset(slot, key_cache_block_stride, key_cache_token_stride, BLOCK_SIZE)
    target = (target + head * key_cache_head_stride)[:, None] + element[None, :]
    tl.store(key_cache + target, keys, mask=live[:, None] & (element < KEY_SIZE)[None, :])
    target = _slot_offset(slot, value_cache_block_stride, value_cache_token_stride, BLOCK_SIZE)
    target = (target + head * value_cache_head_stride)[:, None] + element[None, :]
    cache = key_cache if value_cache is None else value_cache
    tl.store(cache + value_offset + target, values, mask=live[:, None] & (element < VALUE_SIZE)[None, :])
    k_scale_target = _slot_offset(slot, k_scale_block_stride, k_scale_token_stride, BLOCK_SIZE)
    v_scale_target = _slot_offset(slot, v_scale_block_stride, v_scale_token_stride, BLOCK_SIZE)
    tl.store(k_scale_cache + k_scale_target + head * k_scale_head_stride, k_scale, mask=live)
    tl.store(v_scale_cache + v_scale_target + head * v_scale_head_stride, v_scale, mask=live)
