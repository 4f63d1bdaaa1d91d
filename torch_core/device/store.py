"""Query rows in, output rows out: tiles of (token, head) rows, with the output's quantisation."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["as_multiplied", "query_tile", "store_rows", "zero_rows"]


@triton.jit
def query_tile(
    query,
    tokens,
    heads,
    live,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDES: tl.constexpr,
    NEGATE: tl.constexpr,
):
    """Loads the rows (token, head) of the query, 0 where not live; negated for a negative attention scale."""
    dims = tl.arange(0, PADDED)
    rows = query + tokens.to(tl.int64) * STRIDES[0] + heads * STRIDES[1]
    q = tl.load(rows[:, None] + dims[None, :], mask=live[:, None] & (dims < SIZE)[None, :], other=0.0)
    if NEGATE:
        q = -q
    return q


@triton.jit
def as_multiplied(q, key_cache):
    """The query in the type in which the matrix units multiply it with the cache's keys.

    8-bit keys are widened to fp16, which holds every one of their values; Hopper has no conversion from them to bf16.
    """
    if key_cache.dtype.element_ty.primitive_bitwidth > 8:
        q = q.to(key_cache.dtype.element_ty)
    elif q.dtype != tl.float32:
        q = q.to(tl.float16)
    return q


@triton.jit
def store_rows(
    out,
    lse,
    values,
    row_lse,
    tokens,
    heads,
    live,
    v_scale,
    out_scale,
    out_factor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
):
    """Stores finished rows and their log-sum-exp.

    `out_factor` holds the scales that are known on the host: the values' scale over the output's. Scales that are
    only on the device come as v_scale and out_scale. An OUT_LIMIT other than 0 saturates an 8-bit output.
    """
    factor = out_factor
    if v_scale is not None:
        factor = factor * tl.load(v_scale)
    if out_scale is not None:
        factor = factor / tl.load(out_scale)
    values = values * factor
    if OUT_LIMIT > 0:
        values = tl.minimum(tl.maximum(values, -OUT_LIMIT), OUT_LIMIT)
    dims = tl.arange(0, PADDED)
    rows = out + tokens.to(tl.int64) * STRIDES[0] + heads * STRIDES[1]
    mask = live[:, None] & (dims < SIZE)[None, :]
    tl.store(rows[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + tokens.to(tl.int64) * LSE_STRIDES[0] + heads * LSE_STRIDES[1], row_lse, mask=live)


@triton.jit
def zero_rows(
    out,
    lse,
    tokens,
    heads,
    live,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDES: tl.constexpr,
    LSE_STRIDES: tl.constexpr,
):
    """Writes what rows without a visible key hold: zeros, and a log-sum-exp of -inf."""
    dims = tl.arange(0, PADDED)
    rows = out + tokens.to(tl.int64) * STRIDES[0] + heads * STRIDES[1]
    zeros = tl.zeros([tokens.shape[0], PADDED], tl.float32).to(out.dtype.element_ty)
    tl.store(rows[:, None] + dims[None, :], zeros, mask=live[:, None] & (dims < SIZE)[None, :])
    if lse is not None:
        empty = tl.full([tokens.shape[0]], float("-inf"), tl.float32)
        tl.store(lse + tokens.to(tl.int64) * LSE_STRIDES[0] + heads * LSE_STRIDES[1], empty, mask=live)
