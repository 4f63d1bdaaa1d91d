"""Attention over 8-bit keys and values, read two at a time: even and odd elements of a head are multiplied apart.

The matrix units take 16-bit operands whose neighbours along the summed axis share a register. A byte of a value's row
has its neighbour in the next row, so bytes would have to be gathered one by one; pairs of bytes are moved like 16-bit
elements and widened where they lie. The order of a head's elements does not matter to a dot product, and the output's
even and odd elements meet again when they are stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_core.device.mask import tile_scores
from torch_core.device.softmax import softmax_step
from torch_core.device.tiles import key_rows, load_tile, token_head_scales


@triton.jit
def attend_pairs(
    q_even, q_odd, acc_even, acc_odd, row_max, row_sum, pages, position, columns, inside, query_pos, keys, scoring,
    ELEMENT: tl.constexpr, LAYOUT: tl.constexpr, ALIBI_SQRT: tl.constexpr,
):  # fmt: skip
    """`step.attend_tile` over a paged cache read as pairs; returns the new (acc_even, acc_odd, row_max, row_sum).

    LAYOUT is that of the 8-bit ELEMENTs; `keys.key` and `keys.value` point to pairs.
    """
    BLOCK_SIZE: tl.constexpr = LAYOUT.BLOCK_SIZE
    key_pos = position + columns
    key_strides: tl.constexpr = (LAYOUT.KEY_STRIDES[0] // 2, LAYOUT.KEY_STRIDES[1] // 2)
    rows = key_rows(keys.key, pages, position, columns, key_strides, BLOCK_SIZE, True)
    if LAYOUT.VALUE_OFFSET > 0:
        value_rows = rows + LAYOUT.VALUE_OFFSET // 2
    else:
        value_strides: tl.constexpr = (LAYOUT.VALUE_STRIDES[0] // 2, LAYOUT.VALUE_STRIDES[1] // 2)
        value_rows = key_rows(keys.value, pages, position, columns, value_strides, BLOCK_SIZE, True)
    key_factors = None
    if keys.key_scales is not None:
        key_factors = token_head_scales(keys.key_scales, pages, key_pos, inside, LAYOUT.SCALE_STRIDES, BLOCK_SIZE)
    k_even, k_odd = widened(load_tile(rows, inside, LAYOUT.HEAD_SIZE // 2, LAYOUT.HEAD_PADDED // 2, True), ELEMENT)
    v_pairs = load_tile(value_rows, inside, LAYOUT.VALUE_SIZE // 2, LAYOUT.VALUE_PADDED // 2, True)
    v_even, v_odd = widened(v_pairs, ELEMENT)
    products = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))
    scores, factor = tile_scores(products, query_pos, key_pos, key_factors, scoring, ALIBI_SQRT, 0, True, False)
    weights, keep, row_max, row_sum = softmax_step(scores, factor, row_max, row_sum, False)
    if keys.value_scales is not None:
        factors = token_head_scales(keys.value_scales, pages, key_pos, inside, LAYOUT.SCALE_STRIDES, BLOCK_SIZE)
        weights = weights * factors[None, :]
    weights = weights.to(q_even.dtype)
    acc_even = tl.dot(weights, v_even, acc_even * keep[:, None])
    acc_odd = tl.dot(weights, v_odd, acc_odd * keep[:, None])
    return acc_even, acc_odd, row_max, row_sum


@triton.jit
def widened(pairs, ELEMENT: tl.constexpr):
    """The low and the high elements of int16 pairs, in fp16, which holds every value of the 8-bit types.

    Two pairs share a register; a byte permutation brings the bytes of a kind together, which the compiler would do with
    shifts and masks for each byte.
    """
    if tl.float8e5 == ELEMENT:
        # The upper half of fp16.
        low, high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=&r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif tl.int8 == ELEMENT:
        # With the sign bit flipped a byte counts from -128; put below the exponent of 1024, it adds to 1024.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, magic;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 $0, bytes, 0x64646464, 0x4240;
            prmt.b32 $1, bytes, 0x64646464, 0x4341;
            mov.b32 magic, 0x64806480;
            sub.rn.f16x2 $0, $0, magic;
            sub.rn.f16x2 $1, $1, magic;
            }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 first, second;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {first, second}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=&r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high
