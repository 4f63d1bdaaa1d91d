"""The kernel that rotates new queries and keys and writes keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.quantize import load_scale, store_value


@triton.jit
def rotary_write_kernel(
    qkv,
    cos_sin,
    slot_mapping,
    row_scale,
    column_scale,
    k_scale,
    v_scale,
    kv_cache,
    out,
    k_scale_value,
    v_scale_value,
    num_tokens,
    num_mapped,
    num_slots,
    qkv_token_stride,
    qkv_head_stride,
    cos_sin_token_stride,
    kv_cache_block_stride,
    kv_cache_token_stride,
    kv_cache_head_stride,
    value_offset,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Does a tile of TOKENS tokens by HEADS heads, either of queries or of keys and their values.

    Rows are (token, head) pairs. The first HALF pairs of a row's elements are rotated.
    """
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = row % HEADS
    tile = tl.program_id(1)
    exists = token < num_tokens
    place = token.to(tl.int64)
    angles = cos_sin + place * cos_sin_token_stride
    sources = qkv + place * qkv_token_stride
    by_token = 1.0
    if row_scale is not None:
        by_token = tl.load(row_scale + token, mask=exists, other=1.0)[:, None]
    if tile < QUERY_TILES:
        query = tile * HEADS + head
        queries = out + place * out_token_stride + query * out_head_stride
        sources += query * qkv_head_stride
        asked = exists & (query < NUM_HEADS)
        _rotate(
            sources, angles, queries, asked, by_token, column_scale, query, 1.0,
            HEAD_SIZE, PADDED_SIZE, HALF, PADDED_HALF, False, NEOX,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = kv_cache.dtype.element_ty
        key = (tile - QUERY_TILES) * HEADS + head
        slot = tl.load(slot_mapping + token, mask=token < num_mapped, other=-1).to(tl.int64)
        live = (slot >= 0) & (slot < num_slots) & (key < NUM_KV_HEADS)
        sources += (NUM_HEADS + key) * qkv_head_stride
        targets = kv_cache + slot // BLOCK_SIZE * kv_cache_block_stride + slot % BLOCK_SIZE * kv_cache_token_stride
        targets += key * kv_cache_head_stride
        element = tl.arange(0, PADDED_SIZE)[None, :]
        mask = live[:, None] & (element < HEAD_SIZE)
        value_sources, first = sources + NUM_KV_HEADS * qkv_head_stride, (NUM_HEADS + NUM_KV_HEADS + key) * HEAD_SIZE
        values = _scaled(value_sources, element, mask, by_token, column_scale, first)
        scale = load_scale(k_scale, k_scale_value)
        _rotate(
            sources, angles, targets, live, by_token, column_scale, NUM_HEADS + key, scale,
            HEAD_SIZE, PADDED_SIZE, HALF, PADDED_HALF, HAS_SCALE, NEOX,
        )  # fmt: skip
        values = store_value(values, load_scale(v_scale, v_scale_value), dtype, HAS_SCALE)
        tl.store(targets[:, None] + value_offset + element, values, mask=mask)


@triton.jit
def _rotate(
    sources, angles, targets, live, by_token, column_scale, head, scale, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, HAS_SCALE: tl.constexpr,
    NEOX: tl.constexpr,
):  # fmt: skip
    rounded: tl.constexpr = sources.dtype.element_ty
    dtype: tl.constexpr = targets.dtype.element_ty
    pair = tl.arange(0, PADDED_HALF)[None, :]
    mask = live[:, None] & (pair < HALF)
    first = pair if NEOX else 2 * pair
    second = pair + HALF if NEOX else 2 * pair + 1
    x = _scaled(sources, first, mask, by_token, column_scale, head * HEAD_SIZE).to(tl.float32)
    y = _scaled(sources, second, mask, by_token, column_scale, head * HEAD_SIZE).to(tl.float32)
    cos = tl.load(angles[:, None] + pair, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angles[:, None] + pair + HALF, mask=mask, other=0.0).to(tl.float32)
    turned = store_value((x * cos - y * sin).to(rounded), scale, dtype, HAS_SCALE)
    tl.store(targets[:, None] + first, turned, mask=mask)
    turned = store_value((y * cos + x * sin).to(rounded), scale, dtype, HAS_SCALE)
    tl.store(targets[:, None] + second, turned, mask=mask)
    if 2 * HALF < HEAD_SIZE:
        element = tl.arange(0, PADDED_SIZE)[None, :]
        mask = live[:, None] & (element >= 2 * HALF) & (element < HEAD_SIZE)
        rest = _scaled(sources, element, mask, by_token, column_scale, head * HEAD_SIZE)
        tl.store(targets[:, None] + element, store_value(rest, scale, dtype, HAS_SCALE), mask=mask)


@triton.jit
def _scaled(sources, element, mask, by_token, column_scale, column):
    """Elements of heads times the factors of their token and of their column, rounded to their own type."""
    found = tl.load(sources[:, None] + element, mask=mask, other=0.0)
    if column_scale is not None:
        factor = tl.load(column_scale + column[:, None] + element, mask=mask, other=0.0)
        found = (found.to(tl.float32) * by_token * factor).to(sources.dtype.element_ty)
    return found
