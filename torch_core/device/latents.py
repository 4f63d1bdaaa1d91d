"""Rows of packed latents: e4m3 with a scale for each group, and a rotary key in bfloat16; see LatentCacheSpec."""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP = tl.constexpr(128)


@triton.jit
def unpacked_latents(rows, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, dtype: tl.constexpr):
    """The latents of packed rows that start at the pointers `rows`, rounded to `dtype`; 0 and not read outside."""
    COUNT: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = PADDED // _GROUP
    element = tl.arange(0, PADDED)
    group = tl.arange(0, GROUPS)
    mask = inside[:, None] & (element < SIZE)[None, :]
    codes = tl.load(rows[:, None] + element[None, :], mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    scales = (rows + SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
    mask = inside[:, None] & (group < SIZE // _GROUP)[None, :]
    scales = tl.load(scales[:, None] + group[None, :], mask=mask, other=0.0)
    # By way of float16: there is a conversion for pairs of e4m3.
    groups = tl.reshape(codes.to(tl.float16).to(tl.float32), [COUNT, GROUPS, _GROUP]) * scales[:, :, None]
    return tl.reshape(groups, [COUNT, PADDED]).to(dtype)


@triton.jit
def packed_rotary(rows, SIZE: tl.constexpr):
    """Pointers to the rotary keys of packed rows with latents of SIZE elements."""
    return (rows + (SIZE + SIZE // _GROUP * 4)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
