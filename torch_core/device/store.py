"""Query rows in, output rows out: tiles of (token, head) rows, with the output's quantisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Output(NamedTuple):
    """The destination of finished rows, and the factor that they are multiplied by."""

    out: Any  # The output.
    lse: Any  # The log-sum-exp of its rows, or None.
    factor: Any  # The scales that are known on the host: the values' scale over the output's.
    v_scale: Any  # v_scale, out_scale: pointers to the scales that are only on the device, or None.
    out_scale: Any


class RowLayout(NamedTuple):
    """The layout of an Output, known when compiling."""

    SIZE: Any  # Elements of a row.
    PADDED: Any  # Elements of a row, as a power of two.
    STRIDES: Any  # STRIDES, LSE_STRIDES: strides of (token, head) in elements.
    LSE_STRIDES: Any
    LIMIT: Any  # Where an 8-bit output saturates; 0 for others.


@triton.jit
def query_tile(
    query, tokens, heads, live, SIZE: tl.constexpr, PADDED: tl.constexpr, STRIDES: tl.constexpr, NEGATE: tl.constexpr
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
def store_rows(output, values, row_lse, tokens, heads, live, LAYOUT: tl.constexpr):
    """Stores finished rows and their log-sum-exp in the Output `output`, whose RowLayout is LAYOUT."""
    factor = output.factor
    if output.v_scale is not None:
        factor = factor * tl.load(output.v_scale)
    if output.out_scale is not None:
        factor = factor / tl.load(output.out_scale)
    values = values * factor
    if LAYOUT.LIMIT > 0:
        values = tl.minimum(tl.maximum(values, -LAYOUT.LIMIT), LAYOUT.LIMIT)
    _store(output, values, row_lse, tokens, heads, live, LAYOUT)


@triton.jit
def zero_rows(output, tokens, heads, live, LAYOUT: tl.constexpr):
    """Writes the result of rows without a visible key: zeros, and a log-sum-exp of -inf."""
    zeros = tl.zeros([tokens.shape[0], LAYOUT.PADDED], tl.float32)
    _store(output, zeros, tl.full([tokens.shape[0]], float("-inf"), tl.float32), tokens, heads, live, LAYOUT)


@triton.jit
def _store(output, values, row_lse, tokens, heads, live, LAYOUT: tl.constexpr):
    dims = tl.arange(0, LAYOUT.PADDED)
    rows = output.out + tokens.to(tl.int64) * LAYOUT.STRIDES[0] + heads * LAYOUT.STRIDES[1]
    mask = live[:, None] & (dims < LAYOUT.SIZE)[None, :]
    tl.store(rows[:, None] + dims[None, :], values.to(output.out.dtype.element_ty), mask=mask)
    if output.lse is not None:
        rows = output.lse + tokens.to(tl.int64) * LAYOUT.LSE_STRIDES[0] + heads * LAYOUT.LSE_STRIDES[1]
        tl.store(rows, row_lse, mask=live)
