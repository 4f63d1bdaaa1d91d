"""The warpgroups of the fp8 Hopper prefill kernel that multiply: one takes 64 query rows through a sequence's keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.kernels.hopper_fp8.softmax import fp8_softmax_step, initial_fp8_state
from torch_core.attention.kernels.hopper_fp8.transpose import in_columns
from torch_core.device.hopper_items import words_of
from torch_core.device.hopper_rows import finish_rows, mask_scores, own_tiles, store_lse, store_partial
from torch_core.device.hopper_softmax import rescale, row_references, row_sums
from torch_core.device.hopper_turns import ring_slot, skip_tiles
from torch_core.device.mask import LOG2E

# Into registers of its own: without it the next weights would go where these are still being multiplied, and ptxas
# would wait after each product.
_SWAP_BACK = gl.constexpr("prmt.b32 $0, $1, 0, 0x1032;")


class Scales(NamedTuple):
    """Pointers to the scales of query, keys and values that are arrays; None for those that are numbers."""

    query: Any
    key: Any
    value: Any


@gluon.jit
def attend_fp8_rows(OWN: gl.constexpr, call, scales, rings, SHAPE: gl.constexpr, OVERLAP: gl.constexpr):
    """One warpgroup: rows 64 * OWN .. 64 * OWN + 63 of every tile of this program."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WARPGROUPS: gl.constexpr = SHAPE.WARPGROUPS
    QUERY_STAGES: gl.constexpr = rings.query.full.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(HEAD_SIZE, 128), 32])
    INFO_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEFT: gl.constexpr = call.bounds.window_left is not None
    SPLIT: gl.constexpr = call.split is not None
    keys = rings.key
    values = rings.value
    num_items = call.num_items
    in_rows = gl.arange(0, 64, layout=ROWS)
    scale = call.scale
    output = call.output
    out_factor = output.factor
    if scales.query is not None:
        scale *= gl.load(scales.query)
    if scales.key is not None:
        scale *= gl.load(scales.key)
    if scales.value is not None:
        out_factor *= gl.load(scales.value)
    factor = scale * LOG2E
    programs = gl.num_programs(0)
    step = 0
    for turn in range((num_items + programs - 1) // programs):
        place = gl.program_id(0)
        place = gl.where(turn % 2 == 0, place, programs - 1 - place)
        if turn * programs + place < num_items:
            slot = turn % QUERY_STAGES
            q = rings.query.tiles.index(slot * WARPGROUPS + OWN)
            mbarrier.wait(rings.query.full.index(slot), (turn // QUERY_STAGES) & 1)
            told = rings.told.index(slot).load(INFO_LAYOUT)
            first_row, tokens, first_pos, num_keys, head, _, first_key, partial_row = words_of(told)

            if not SPLIT:
                first_key = None
            span = own_tiles(first_pos, tokens, first_key, num_keys, call.bounds, in_rows, OWN, SHAPE)
            step = skip_tiles(span.own_end, span.end, keys, values, step, OWN, SHAPE)

            stage, phase = ring_slot(keys, step)
            zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            acc = gl.zeros([64, HEAD_SIZE], gl.float32, O_LAYOUT)
            mbarrier.wait(keys.full.index(stage), phase)
            s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(keys.empty.index(stage), count=1)
            position = (span.own_end - 1) * BLOCK_N
            s = mask_scores(s, span.first - position, span.last - position, LEFT)
            state = initial_fp8_state(factor, span.last - position + 1, S_LAYOUT)
            words, state = fp8_softmax_step(s, state, True)
            if not OVERLAP:
                acc = _weigh_tile(words, acc, values, step)
            step += 1

            step, acc, words, state = _attend_tiles(
                q, rings, step, acc, words, state, span.first, span.last, span.body_end, span.own_end - 1, OWN,
                SHAPE, OVERLAP, True, LEFT, S_LAYOUT,
            )  # fmt: skip
            step, acc, words, state = _attend_tiles(
                q, rings, step, acc, words, state, span.first, span.last, span.body_start, span.body_end, OWN,
                SHAPE, OVERLAP, False, LEFT, S_LAYOUT,
            )  # fmt: skip
            if LEFT:
                step, acc, words, state = _attend_tiles(
                    q, rings, step, acc, words, state, span.first, span.last, span.own_start, span.body_start,
                    OWN, SHAPE, OVERLAP, True, LEFT, S_LAYOUT,
                )  # fmt: skip

            mbarrier.arrive(rings.query.empty.index(slot), count=1)
            if OVERLAP:
                acc = _weigh_tile(words, acc, values, step - 1)
            if LEFT:
                step = skip_tiles(span.start, span.own_start, keys, values, step, OWN, SHAPE)

            row_sum = gl.convert_layout(row_sums(state), ROWS)
            shift = gl.convert_layout(row_references(state), ROWS)
            acc = in_columns(acc)
            if SPLIT:
                store_partial(acc, row_sum, shift, call.split, partial_row, tokens, head, OWN, SHAPE)
            else:
                empty = row_sum == 0.0
                shift = gl.where(empty, 0.0, shift)
                inverse, shift, total = finish_rows(row_sum, shift, empty, head, in_rows, output, SHAPE.PACK)
                acc = acc * gl.convert_layout(inverse * out_factor, gl.SliceLayout(1, acc.type.layout))[:, None]
                pointers = output.out + first_row.to(gl.int64) * SHAPE.OUT_STRIDES[0] + head * SHAPE.OUT_STRIDES[1]
                _store_rows(acc, pointers, OWN * 64, tokens, SHAPE)
                store_lse(output, shift, total, empty, first_row, tokens, head, in_rows, OWN, SHAPE)


@gluon.jit
def _attend_tiles(
    q, rings, step, acc, words, state, first, last, start, end, OWN: gl.constexpr, SHAPE: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, last ones first; with MASKED, rows see the keys [first, last].

    With OVERLAP the scores of tile `step` are made while the values of the one before are weighed, and the values of
    the last tile are not in `acc` yet. Without, a tile is done with when the next one begins: fewer registers. Returns
    the next (step, acc, words, state).
    """
    keys = rings.key
    values = rings.value
    for i in range(end - start):
        position = (end - 1 - i) * SHAPE.BLOCK_N
        tile_first = first - position
        tile_last = last - position
        stage, phase = ring_slot(keys, step)
        before, phase_before = ring_slot(values, step - 1)
        zeros = gl.zeros([64, 128], gl.float32, S_LAYOUT)
        if OVERLAP:
            p = _unpack_weights(words, acc)
        mbarrier.wait(keys.full.index(stage), phase)
        if OVERLAP:
            mbarrier.wait(values.full.index(before), phase_before)
        s = warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if OVERLAP:
            acc = warpgroup_mma(p, values.tiles.index(before).permute((1, 0)), acc, is_async=True)
        s = warpgroup_mma_wait(1 if OVERLAP else 0, deps=(s,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        if MASKED:
            s = mask_scores(s, tile_first, tile_last, LEFT)
        words, state = fp8_softmax_step(s, state, False)
        if OVERLAP:
            acc, words = warpgroup_mma_wait(0, deps=(acc, words))
            mbarrier.arrive(values.empty.index(before), count=1)
        acc = rescale(acc, state)
        if not OVERLAP:
            acc = _weigh_tile(words, acc, values, step)
        step += 1
    return step, acc, words, state


@gluon.jit
def _weigh_tile(words, acc, values, step):
    """The sums with the values of the tile `step`, weighed."""
    slot, phase = ring_slot(values, step)
    p = _unpack_weights(words, acc)
    mbarrier.wait(values.full.index(slot), phase)
    acc = warpgroup_mma(p, values.tiles.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(values.empty.index(slot), count=1)
    return acc


@gluon.jit
def _unpack_weights(packed, acc):
    """The weights as the left operand of the product with values."""
    # Each integer four times over, side by side where the operand has its bytes: the assembly names them all at once.
    words = gl.join(packed, packed)
    words = gl.join(words, words).reshape([packed.shape[0], packed.shape[1] * 4])
    words = gl.convert_layout(words, gl.DotOperandLayout(0, acc.type.layout, 4))
    p = gl.inline_asm_elementwise(_SWAP_BACK, "=r,r,r,r,r", [words], dtype=gl.int8, is_pure=True, pack=4)
    return p.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _store_rows(acc, out, base, tokens, SHAPE: gl.constexpr):
    """Stores 64 rows, 16 bytes at a time."""
    PACK: gl.constexpr = SHAPE.PACK
    layout: gl.constexpr = acc.type.layout
    rows = base + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SHAPE.HEAD_SIZE, layout=gl.SliceLayout(0, layout))
    places = (rows // PACK).to(gl.int64) * SHAPE.OUT_STRIDES[0]
    if PACK > 1:
        places += rows % PACK * SHAPE.OUT_STRIDES[1]
    mask = rows < tokens * PACK
    gl.store(out + places[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=mask[:, None])
