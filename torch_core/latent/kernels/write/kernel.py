"""The kernel that writes new latents and rotary keys into their cache: as they are, quantised or packed."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.quantize import GROUP, load_scale, packed_rotary, saturate_to, store_value


@triton.jit
def write_latent_kernel(
    kv_c,
    k_pe,
    slot_mapping,
    latent_cache,
    k_scale,
    cos_sin_cache,
    positions,
    k_scale_value,
    num_tokens,
    num_slots,
    kv_c_token_stride,
    k_pe_token_stride,
    cos_sin_cache_position_stride,
    latent_cache_block_stride,
    latent_cache_token_stride,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Writes the rows of TOKENS tokens; with a cos_sin_cache, rotates their rotary keys first.

    The strides of a packed cache are bytes: RANK e4m3, RANK / 128 scales in float32, ROPE bfloat16.
    """
    dtype: tl.constexpr = latent_cache.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    token = token.to(tl.int64)
    target = slot // BLOCK_SIZE * latent_cache_block_stride + slot % BLOCK_SIZE * latent_cache_token_stride
    rows = latent_cache + target
    element = tl.arange(0, RANK_PADDED)
    mask = live[:, None] & (element < RANK)[None, :]
    latents = tl.load(kv_c + (token * kv_c_token_stride)[:, None] + element[None, :], mask=mask, other=0.0)
    scale = load_scale(k_scale, k_scale_value)
    if PACKED:
        codes, scales = _packed(latents)
        tl.store(rows[:, None] + element[None, :], codes, mask=mask)
        group = tl.arange(0, RANK_PADDED // GROUP)
        starts = (rows + RANK).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(starts[:, None] + group[None, :], scales, mask=live[:, None] & (group < RANK // GROUP)[None, :])
        rotary = packed_rotary(rows, RANK)
    else:
        tl.store(rows[:, None] + element[None, :], store_value(latents, scale, dtype, HAS_SCALE), mask=mask)
        rotary = rows + RANK
    sources = k_pe + token * k_pe_token_stride
    if cos_sin_cache is None:
        element = tl.arange(0, ROPE_PADDED)
        mask = live[:, None] & (element < ROPE)[None, :]
        keys = tl.load(sources[:, None] + element[None, :], mask=mask)
        _store_keys(rotary, element, keys, scale, mask, dtype, HAS_SCALE, PACKED)
    else:
        pair = tl.arange(0, ROPE_PADDED // 2)
        mask = live[:, None] & (pair < ROPE // 2)[None, :]
        first = pair if NEOX else 2 * pair
        second = pair + ROPE // 2 if NEOX else 2 * pair + 1
        position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
        angles = cos_sin_cache + (position * cos_sin_cache_position_stride)[:, None] + pair[None, :]
        cos = tl.load(angles, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(angles + ROPE // 2, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(sources[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(sources[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded: tl.constexpr = k_pe.dtype.element_ty
        _store_keys(rotary, first, (x * cos - y * sin).to(rounded), scale, mask, dtype, HAS_SCALE, PACKED)
        _store_keys(rotary, second, (y * cos + x * sin).to(rounded), scale, mask, dtype, HAS_SCALE, PACKED)


@triton.jit
def _store_keys(rows, element, keys, scale, mask, dtype: tl.constexpr, HAS_SCALE: tl.constexpr, PACKED: tl.constexpr):
    stored = keys.to(tl.bfloat16) if PACKED else store_value(keys, scale, dtype, HAS_SCALE)
    tl.store(rows[:, None] + element[None, :], stored, mask=mask)


@triton.jit
def _packed(latents):
    """(bytes, scales) of latents, for which a scale of a row of zeros is the smallest normal number."""
    TOKENS: tl.constexpr = latents.shape[0]
    GROUPS: tl.constexpr = latents.shape[1] // GROUP
    groups = tl.reshape(latents.to(tl.float32), [TOKENS, GROUPS, GROUP])
    largest = tl.max(tl.abs(groups), 2)
    scales = tl.maximum(tl.div_rn(largest, tl.full([TOKENS, GROUPS], 448.0, tl.float32)), 1.1754943508222875e-38)
    codes = saturate_to(tl.div_rn(groups, tl.broadcast_to(scales[:, :, None], groups.shape)), tl.float8e4nv)
    return tl.reshape(codes.to(tl.uint8, bitcast=True), latents.shape), scales
