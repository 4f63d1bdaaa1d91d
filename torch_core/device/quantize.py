"""Device helpers that convert computed values to the stored values of a cache or an output array."""

from __future__ import annotations

import triton
import triton.language as tl


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
