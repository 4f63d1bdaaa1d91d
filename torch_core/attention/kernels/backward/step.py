"""The weights of a tile in the backward pass, and the factors of their gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import LOG2E, soft_capped, tile_scores
from torch_core.device.tiles import load_tile


@triton.jit
def load_rows(
    base, position, columns, inside, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The rows position + columns of a packed array, from the base of its sequence and head; see tiles.load_tile."""
    rows = (base + tl.cast(position, tl.int64) * STRIDE) + columns * STRIDE
    return load_tile(rows, inside, SIZE, PADDED, MASKED)


@triton.jit
def tile_weights(
    products, query_pos, key_pos, row_lse, scoring, ALIBI_SQRT: tl.constexpr, NUM_RANGES: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The softmax weights of a tile, from the rows' log-sum-exp; 0 where masked, and in rows whose lse is inf.

    The arguments are those of mask.tile_scores. `row_lse` is in units of log 2, in natural ones with EXACT.
    """
    scores, factor = tile_scores(
        products, query_pos, key_pos, None, scoring, ALIBI_SQRT, NUM_RANGES, MASKED, EXACT, TRANSPOSED
    )
    lse = row_lse[None, :] if TRANSPOSED else row_lse[:, None]
    return tl.math.exp2((scores - lse) * LOG2E) if EXACT else tl.math.exp2(scores * factor - lse)


@triton.jit
def score_slope(gradient, products, scoring):
    """The gradient of the scaled products from that of the scores: the soft cap's derivative, if there is one."""
    if scoring.soft_cap is not None:
        tanh = soft_capped(products * scoring.scale, scoring.soft_cap) / scoring.soft_cap
        gradient = gradient * (1.0 - tanh * tanh)
    return gradient


@triton.jit
def add_product(a, b, acc, EXACT: tl.constexpr):
    """acc + a @ b; with EXACT tile by tile, by a fused form that the compiler leaves alone: see step.attend_tile."""
    if EXACT:
        acc = tl.math.fma(acc, tl.full(acc.shape, 1.0, tl.float32), tl.dot(a, b, input_precision="ieee"))
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
