"""The warpgroups of the fp8 Hopper prefill kernel that multiply: one takes 64 query rows through a sequence's keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.attention.hopper.step import pass_turn, ring_slot, skip_tile, take_turn
from torch_core.attention.hopper_fp8.step import (
    FP8_WEIGHT_BITS,
    add_product,
    attend_fp8_tile,
    fp8_softmax_step,
    pack_fp8_weights,
    weigh_values,
)
from torch_core.device.hopper_work import key_span

__all__ = ["attend_fp8_rows"]

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def attend_fp8_rows(
    OWN: gl.constexpr, sinks, q_scale, k_scale, v_scale, out, lse, scale, out_factor, window_left, window_right,
    num_items, q_tiles, info, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    WARPGROUPS: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, PROMOTE: gl.constexpr, NUM_HEADS: gl.constexpr,
    OUT_TOKEN_STRIDE: gl.constexpr, OUT_HEAD_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows 64 * OWN .. 64 * OWN + 63 of every tile of this program."""
    BLOCK_N: gl.constexpr = 128
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 32])
    INFO_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEFT: gl.constexpr = window_left is not None
    fields = gl.arange(0, 8, layout=INFO_LAYOUT)
    in_rows = gl.arange(0, 64, layout=ROWS)
    if q_scale is not None:
        scale *= gl.load(q_scale)
    if k_scale is not None:
        scale *= gl.load(k_scale)
    if v_scale is not None:
        out_factor *= gl.load(v_scale)
    factor = scale * _LOG2E
    programs = gl.num_programs(0)
    step = 0
    if PING_PONG and OWN == WARPGROUPS - 1:
        pass_turn(OWN, WARPGROUPS)
    for turn in range((num_items + programs - 1) // programs):
        place = gl.program_id(0)
        place = gl.where(turn % 2 == 0, place, programs - 1 - place)
        if turn * programs + place < num_items:
            slot = turn % QUERY_STAGES
            q = q_tiles.index(slot * WARPGROUPS + OWN)
            mbarrier.wait(q_full.index(slot), (turn // QUERY_STAGES) & 1)
            told = info.index(slot).load(INFO_LAYOUT)
            first_row = gl.sum(gl.where(fields == 0, told, 0), 0)
            rows = gl.sum(gl.where(fields == 1, told, 0), 0)
            first_pos = gl.sum(gl.where(fields == 2, told, 0), 0)
            num_keys = gl.sum(gl.where(fields == 3, told, 0), 0)
            head = gl.sum(gl.where(fields == 4, told, 0), 0)

            # Tiles of keys, counted from key 0: those of the program, those of this warpgroup, those without a mask.
            low, high = key_span(first_pos, first_pos + rows - 1, num_keys, window_left, window_right)
            first_tile = low // BLOCK_N
            end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
            own_first = first_pos + OWN * 64
            own_last = first_pos + gl.minimum(rows, OWN * 64 + 64) - 1
            own_low, own_high = key_span(own_first, own_last, num_keys, window_left, window_right)
            own_end = gl.minimum(gl.maximum((own_high + BLOCK_N - 1) // BLOCK_N, first_tile + 1), end_tile)
            own_tile = first_tile
            full_high = num_keys
            if window_right is not None:
                full_high = gl.maximum(gl.minimum(full_high, own_first + window_right + 1), 0)
            body_end = gl.minimum(gl.maximum(full_high // BLOCK_N, own_tile), own_end - 1)
            body_start = own_tile
            positions = own_first + in_rows
            last = positions * 0 + num_keys - 1
            if window_right is not None:
                last = gl.minimum(positions + window_right, num_keys - 1)
            first = last
            if LEFT:
                own_tile = gl.minimum(own_low // BLOCK_N, own_end - 1)
                full_low = gl.maximum(own_last - window_left, 0)
                body_end = gl.maximum(body_end, own_tile)
                body_start = gl.minimum(gl.maximum((full_low + BLOCK_N - 1) // BLOCK_N, own_tile), body_end)
                first = positions - window_left

            for _ in range(own_end, end_tile):
                skip_tile(k_full, k_empty, v_full, v_empty, step, OWN, WARPGROUPS, STAGES, PING_PONG)
                step += 1

            stage, phase = ring_slot(step, STAGES)
            zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            acc = gl.zeros([64, HEAD_SIZE], gl.float32, O_LAYOUT)
            row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            position = (own_end - 1) * BLOCK_N
            weights, keep, row_max, row_sum = fp8_softmax_step(
                s, row_max, None, factor, first - position, last - position, True, LEFT
            )
            weights = pack_fp8_weights(weights)
            step += 1

            for i in range(own_end - 1 - body_end):
                position = (own_end - 2 - i) * BLOCK_N
                weights, acc, keep, row_max, row_sum = attend_fp8_tile(
                    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, keep, row_max, row_sum,
                    factor, first - position, last - position, OWN, WARPGROUPS, STAGES, PING_PONG, PROMOTE,
                    True, LEFT, S_LAYOUT,
                )  # fmt: skip
                step += 1
            for _ in range(body_end - body_start):
                weights, acc, keep, row_max, row_sum = attend_fp8_tile(
                    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, keep, row_max, row_sum,
                    factor, first, last, OWN, WARPGROUPS, STAGES, PING_PONG, PROMOTE, False, LEFT, S_LAYOUT,
                )  # fmt: skip
                step += 1
            if LEFT:
                for i in range(body_start - own_tile):
                    position = (body_start - 1 - i) * BLOCK_N
                    weights, acc, keep, row_max, row_sum = attend_fp8_tile(
                        q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, keep, row_max,
                        row_sum, factor, first - position, last - position, OWN, WARPGROUPS, STAGES, PING_PONG,
                        PROMOTE, True, LEFT, S_LAYOUT,
                    )  # fmt: skip
                    step += 1

            before, phase = ring_slot(step - 1, STAGES)
            mbarrier.wait(v_full.index(before), phase)
            product = weigh_values(weights, v_tiles.index(before), acc, PROMOTE)
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = add_product(acc, keep, product, PROMOTE)
            if LEFT:
                for _ in range(first_tile, own_tile):
                    skip_tile(k_full, k_empty, v_full, v_empty, step, OWN, WARPGROUPS, STAGES, PING_PONG)
                    step += 1

            row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROWS)
            empty = row_sum == 0.0
            # Weights and sums are 2**FP8_WEIGHT_BITS times as large as the maximum alone would make them.
            shift = gl.where(empty, 0.0, row_max * factor - FP8_WEIGHT_BITS)
            keep = gl.where(empty, 0.0, 1.0)
            if sinks is not None:
                sink = gl.load(sinks + head).to(gl.float32) * _LOG2E
                top = gl.maximum(shift, sink)
                keep = keep * gl.exp2(shift - top)
                row_sum = row_sum * keep + gl.exp2(sink - top)
                shift = top
            total = gl.where(empty, 1.0, row_sum)
            inverse = gl.div_rn(keep, total) * out_factor
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
            pointers = out + first_row.to(gl.int64) * OUT_TOKEN_STRIDE + head * OUT_HEAD_STRIDE
            _store_rows(acc, q, pointers, OWN * 64, rows, HEAD_SIZE, OUT_TOKEN_STRIDE)
            if lse is not None:
                row_lse = gl.where(empty, float("-inf"), (shift + gl.log2(total)) * _LN2)
                lse_rows = OWN * 64 + in_rows
                lse_pointers = lse + (first_row + lse_rows).to(gl.int64) * NUM_HEADS + head
                gl.store(lse_pointers, row_lse, mask=lse_rows < rows)
            fence_async_shared()
            mbarrier.arrive(q_empty.index(slot), count=1)
    if PING_PONG and OWN == 0:
        take_turn(OWN)


@gluon.jit
def _store_rows(acc, q, out, base, rows, HEAD_SIZE: gl.constexpr, OUT_TOKEN_STRIDE: gl.constexpr):
    """Stores 64 rows; they pass through the query tile, done with and half as wide, to be stored 16 bytes at a time."""
    HALF: gl.constexpr = HEAD_SIZE // 2
    LANES: gl.constexpr = HALF // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=HEAD_SIZE, element_bitwidth=16, rank=2)
    tile = q._reinterpret(out.dtype.element_ty, [64, HALF], shared)
    halves = gl.split(acc.reshape([64, 2, HALF]).permute((0, 2, 1)))
    out_rows = base + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    pointers = out + out_rows.to(gl.int64)[:, None] * OUT_TOKEN_STRIDE + columns[None, :]
    for i in gl.static_range(2):
        tile.store(halves[i].to(out.dtype.element_ty))
        gl.store(pointers + i * HALF, tile.load(layout), mask=(out_rows < rows)[:, None])
