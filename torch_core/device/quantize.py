"""Conversions between computed values and the stored values of a cache or an output array."""

from __future__ import annotations

import triton
import triton.language as tl

#: Elements of a packed latent that share a scale.
GROUP = tl.constexpr(128)


@triton.jit
def saturate_to(x, dtype: tl.constexpr):
    """Converts float32 `x` to `dtype`: fp8 clamps to its largest finite value and keeps NaN, int8 rounds to even."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.float8e5:
        x = tl.clamp(x, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.int8:
        # For |x| < 2**22 adding 1.5 * 2**23 leaves no fraction bits, and rounds halves to even.
        x = (tl.clamp(x, -127.0, 127.0) + 12582912.0) - 12582912.0
    return x.to(dtype)


@triton.jit
def store_value(x, scale, dtype: tl.constexpr, HAS_SCALE: tl.constexpr):
    """The stored value of `x`: x / scale, saturated; values of the cache's own 1-byte dtype are unchanged."""
    if x.dtype == dtype and (not HAS_SCALE or dtype.primitive_bitwidth == 8):
        stored = x
    elif HAS_SCALE:
        stored = saturate_to(tl.div_rn(x.to(tl.float32), scale), dtype)
    else:
        stored = saturate_to(x.to(tl.float32), dtype)
    return stored


@triton.jit
def load_scale(scale, value):
    """The factor of a per-tensor scale that was given as the number `value`, or as a pointer to one."""
    if scale is not None:
        value = tl.load(scale).to(tl.float32)
    return value


@triton.jit
def unpacked_latents(rows, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, dtype: tl.constexpr):
    """The latents of packed rows (LatentCacheSpec) at the pointers `rows`, rounded to `dtype`; 0, not read, outside."""
    COUNT: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = PADDED // GROUP
    element = tl.arange(0, PADDED)
    group = tl.arange(0, GROUPS)
    mask = inside[:, None] & (element < SIZE)[None, :]
    codes = tl.load(rows[:, None] + element[None, :], mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    scales = (rows + SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
    mask = inside[:, None] & (group < SIZE // GROUP)[None, :]
    scales = tl.load(scales[:, None] + group[None, :], mask=mask, other=0.0)
    # By way of float16: there is a conversion for pairs of e4m3.
    groups = tl.reshape(codes.to(tl.float16).to(tl.float32), [COUNT, GROUPS, GROUP]) * scales[:, :, None]
    return tl.reshape(groups, [COUNT, PADDED]).to(dtype)


@triton.jit
def packed_rotary(rows, SIZE: tl.constexpr):
    """Pointers to the rotary keys of packed rows with latents of SIZE elements."""
    return (rows + (SIZE + SIZE // GROUP * 4)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
