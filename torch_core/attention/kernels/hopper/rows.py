"""The warpgroups of the Hopper prefill kernel that multiply: one takes 64 query rows through a sequence's keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.attention.kernels.hopper.softmax import initial_state, softmax_step, unpack_weights
from torch_core.device.hopper_items import item_count, read_item
from torch_core.device.hopper_rows import finish_rows, mask_scores, own_tiles, store_lse, store_partial
from torch_core.device.hopper_softmax import rescale, row_references, row_sums
from torch_core.device.hopper_turns import pass_turn, ring_slot, skip_tiles, take_turn
from torch_core.device.mask import LOG2E


@gluon.jit
def attend_rows(OWN: gl.constexpr, call, rings, SHAPE: gl.constexpr, OVERLAP: gl.constexpr):
    """One warpgroup: rows 64 * OWN .. 64 * OWN + 63 of every tile of this program."""
    PACK: gl.constexpr = SHAPE.PACK
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WARPGROUPS: gl.constexpr = SHAPE.WARPGROUPS
    QUERY_STAGES: gl.constexpr = rings.query.full.shape[0]
    PING_PONG: gl.constexpr = SHAPE.PING_PONG
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    LANES: gl.constexpr = HEAD_SIZE // 8
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEFT: gl.constexpr = call.bounds.window_left is not None
    SPLIT: gl.constexpr = call.split is not None
    output = call.output
    keys = rings.key
    values = rings.value
    in_rows = gl.arange(0, 64, layout=ROWS)
    factor = call.scale * LOG2E
    step = 0
    if PING_PONG and OWN == WARPGROUPS - 1:
        pass_turn(OWN, WARPGROUPS)
    for turn in range(item_count(call.num_items)):
        first_row, tokens, first_pos, num_keys, head, _, first_key, partial_row = read_item(rings.items, turn)
        slot = turn % QUERY_STAGES
        q = rings.query.tiles.index(slot * WARPGROUPS + OWN)
        q_rest = None
        if SHAPE.REST_SIZE > 0:
            q_rest = rings.query_rest.index(slot * WARPGROUPS + OWN)
        mbarrier.wait(rings.query.full.index(slot), (turn // QUERY_STAGES) & 1)

        span = own_tiles(first_pos, tokens, first_key if SPLIT else None, num_keys, call.bounds, in_rows, OWN, SHAPE)
        step = skip_tiles(span.own_end, span.end, keys, values, step, OWN, SHAPE)

        stage, phase = ring_slot(keys, step)
        zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        acc = gl.zeros([64, HEAD_SIZE], gl.float32, O_LAYOUT)
        mbarrier.wait(keys.full.index(stage), phase)
        s = _scores(q, q_rest, rings, stage, zeros)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        position = (span.own_end - 1) * BLOCK_N
        s = mask_scores(s, span.first - position, span.last - position, LEFT)
        weights, state = softmax_step(s, initial_state(factor, S_LAYOUT, BLOCK_N), q, True)
        step += 1

        step, acc, weights, state = _attend_tiles(
            q, q_rest, rings, step, acc, weights, state, span.first, span.last, span.body_end, span.own_end - 1, OWN,
            SHAPE, OVERLAP, True, LEFT, S_LAYOUT,
        )  # fmt: skip
        step, acc, weights, state = _attend_tiles(
            q, q_rest, rings, step, acc, weights, state, span.first, span.last, span.body_start, span.body_end, OWN,
            SHAPE, OVERLAP, False, LEFT, S_LAYOUT,
        )  # fmt: skip
        if LEFT:
            step, acc, weights, state = _attend_tiles(
                q, q_rest, rings, step, acc, weights, state, span.first, span.last, span.own_start, span.body_start,
                OWN, SHAPE, OVERLAP, True, LEFT, S_LAYOUT,
            )  # fmt: skip

        before, phase = ring_slot(values, step - 1)
        mbarrier.wait(values.full.index(before), phase)
        p = unpack_weights(weights, q, acc)
        acc = warpgroup_mma(p, values.tiles.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(values.empty.index(before), count=1)
        if LEFT:
            step = skip_tiles(span.start, span.own_start, keys, values, step, OWN, SHAPE)

        row_sum = gl.convert_layout(row_sums(state), ROWS)
        shift = row_references(state)
        if SPLIT:
            store_partial(
                acc, row_sum, gl.convert_layout(shift, ROWS), call.split, partial_row, tokens, head, OWN, SHAPE
            )
        else:
            empty = row_sum == 0.0
            shift = gl.where(empty, 0.0, gl.convert_layout(shift, ROWS))
            inverse, shift, total = finish_rows(row_sum, shift, empty, head, in_rows, output, PACK)
            acc = acc * gl.convert_layout(inverse * output.factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
            # The query tile is done with: the rows pass through it, to be stored 16 bytes at a time.
            q.store(acc.to(q.dtype))
            result = q.load(OUT_LAYOUT)
            out_rows = OWN * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT))
            columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT_LAYOUT))
            out_tokens = (first_row + out_rows // PACK).to(gl.int64)
            pointers = output.out + out_tokens * SHAPE.OUT_STRIDES[0] + (head + out_rows % PACK) * SHAPE.OUT_STRIDES[1]
            gl.store(
                pointers[:, None] + columns[None, :],
                result.to(output.out.dtype.element_ty),
                mask=(out_rows < tokens * PACK)[:, None],
            )
            store_lse(output, shift, total, empty, first_row, tokens, head, in_rows, OWN, SHAPE)
            fence_async_shared()
        mbarrier.arrive(rings.query.empty.index(slot), count=1)
    if PING_PONG and OWN == 0:
        take_turn(OWN)


@gluon.jit
def _scores(q, q_rest, rings, stage, zeros):
    """Starts the products of 64 query rows with the keys of a slot."""
    s = warpgroup_mma(q, rings.key.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if q_rest is not None:
        s = warpgroup_mma(q_rest, rings.key_rest.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _attend_tiles(
    q, q_rest, rings, step, acc, weights, state, first, last, start, end, OWN: gl.constexpr, SHAPE: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Takes the tiles [start, end) of keys, last ones first; with MASKED, rows see the keys [first, last].

    Products and softmax overlap: the scores of tile `step` are made while the values of the one before are weighed.
    Returns the next (step, acc, weights, state); the values of the last tile are not in `acc` yet.
    """
    keys = rings.key
    values = rings.value
    for i in range(end - start):
        position = (end - 1 - i) * SHAPE.BLOCK_N
        tile_first = first - position
        tile_last = last - position
        stage, phase = ring_slot(keys, step)
        before, phase_before = ring_slot(values, step - 1)
        zeros = gl.zeros([64, SHAPE.BLOCK_N], gl.float32, S_LAYOUT)
        p = unpack_weights(weights, q, acc)
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.wait(values.full.index(before), phase_before)
        if SHAPE.PING_PONG:
            take_turn(OWN)
        s = _scores(q, q_rest, rings, stage, zeros)
        acc = warpgroup_mma(p, values.tiles.index(before), acc, is_async=True)
        if SHAPE.PING_PONG:
            pass_turn(OWN, SHAPE.WARPGROUPS)
        if OVERLAP:
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            s, acc = warpgroup_mma_wait(0, deps=(s, acc))
        mbarrier.arrive(keys.empty.index(stage), count=1)
        if not OVERLAP:
            mbarrier.arrive(values.empty.index(before), count=1)
        if MASKED:
            s = mask_scores(s, tile_first, tile_last, LEFT)
        weights, state = softmax_step(s, state, q, False)
        if OVERLAP:
            acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
            mbarrier.arrive(values.empty.index(before), count=1)
        acc = rescale(acc, state)
        step += 1
    return step, acc, weights, state
