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

from torch_core.attention.hopper.softmax import initial_state, row_state, softmax_step, unpack_weights
from torch_core.attention.hopper.step import attend_tile, mask_scores, pass_turn, ring_slot, skip_tile, take_turn
from torch_core.device.hopper_items import item_count, read_item
from torch_core.device.hopper_work import key_span

__all__ = ["attend_rows", "zero_padding"]

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def attend_rows(
    OWN: gl.constexpr, sinks, out, lse, scale, out_factor, window_left, window_right, num_items, items, q_tiles,
    k_tiles, v_tiles, item_full, item_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr, STAGES: gl.constexpr,
    QUERY_STAGES: gl.constexpr, PING_PONG: gl.constexpr, OVERLAP: gl.constexpr, NUM_HEADS: gl.constexpr,
    PACK: gl.constexpr, OUT_TOKEN_STRIDE: gl.constexpr, OUT_HEAD_STRIDE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows 64 * OWN .. 64 * OWN + 63 of every tile of this program."""
    TOKENS: gl.constexpr = 64 // PACK
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    LANES: gl.constexpr = HEAD_SIZE // 8
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEFT: gl.constexpr = window_left is not None
    in_rows = gl.arange(0, 64, layout=ROWS)
    factor = scale * _LOG2E
    step = 0
    if PING_PONG and OWN == WARPGROUPS - 1:
        pass_turn(OWN, WARPGROUPS)
    for turn in range(item_count(num_items)):
        first_row, tokens, first_pos, num_keys, head, _, _ = read_item(items, item_full, item_empty, turn)
        slot = turn % QUERY_STAGES
        q = q_tiles.index(slot * WARPGROUPS + OWN)
        mbarrier.wait(q_full.index(slot), (turn // QUERY_STAGES) & 1)

        # Tiles of keys, counted from key 0: those of the program, those of this warpgroup, those without a mask.
        low, high = key_span(first_pos, first_pos + tokens - 1, num_keys, window_left, window_right)
        first_tile = low // BLOCK_N
        end_tile = gl.maximum((high + BLOCK_N - 1) // BLOCK_N, first_tile + 1)
        own_first = first_pos + OWN * TOKENS
        own_last = first_pos + gl.minimum(tokens, OWN * TOKENS + TOKENS) - 1
        own_low, own_high = key_span(own_first, own_last, num_keys, window_left, window_right)
        own_end = gl.minimum(gl.maximum((own_high + BLOCK_N - 1) // BLOCK_N, first_tile + 1), end_tile)
        if PACK > 1:
            # Short queries often leave a warpgroup without a row: it looks at one tile and lets the others pass.
            own_end = gl.where(tokens > OWN * TOKENS, own_end, first_tile + 1)
        own_tile = first_tile
        full_high = num_keys
        if window_right is not None:
            full_high = gl.maximum(gl.minimum(full_high, own_first + window_right + 1), 0)
        body_end = gl.minimum(gl.maximum(full_high // BLOCK_N, own_tile), own_end - 1)
        body_start = own_tile
        positions = own_first + in_rows // PACK
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
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        position = (own_end - 1) * BLOCK_N
        s = mask_scores(s, first - position, last - position, LEFT)
        weights, state = softmax_step(s, initial_state(factor, S_LAYOUT, BLOCK_N), q, True)
        step += 1

        for i in range(own_end - 1 - body_end):
            position = (own_end - 2 - i) * BLOCK_N
            weights, acc, state = attend_tile(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, state,
                first - position, last - position, OWN, WARPGROUPS, STAGES, PING_PONG, OVERLAP,
                True, LEFT, S_LAYOUT, BLOCK_N,
            )  # fmt: skip
            step += 1
        for _ in range(body_end - body_start):
            weights, acc, state = attend_tile(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, state,
                first, last, OWN, WARPGROUPS, STAGES, PING_PONG, OVERLAP, False, LEFT,
                S_LAYOUT, BLOCK_N,
            )  # fmt: skip
            step += 1
        if LEFT:
            for i in range(body_start - own_tile):
                position = (body_start - 1 - i) * BLOCK_N
                weights, acc, state = attend_tile(
                    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, weights, acc, state,
                    first - position, last - position, OWN, WARPGROUPS, STAGES, PING_PONG, OVERLAP,
                    True, LEFT, S_LAYOUT, BLOCK_N,
                )  # fmt: skip
                step += 1

        before, phase = ring_slot(step - 1, STAGES)
        mbarrier.wait(v_full.index(before), phase)
        p = unpack_weights(weights, q, acc)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        if LEFT:
            for _ in range(first_tile, own_tile):
                skip_tile(k_full, k_empty, v_full, v_empty, step, OWN, WARPGROUPS, STAGES, PING_PONG)
                step += 1

        row_sum, shift = row_state(state)
        row_sum = gl.convert_layout(row_sum, ROWS)
        empty = row_sum == 0.0
        shift = gl.where(empty, 0.0, gl.convert_layout(shift, ROWS))
        keep = gl.where(empty, 0.0, 1.0)
        if sinks is not None:
            if PACK == 1:
                sink = gl.load(sinks + head).to(gl.float32) * _LOG2E
            else:
                sink = gl.load(sinks + head + in_rows % PACK).to(gl.float32) * _LOG2E
            top = gl.maximum(shift, sink)
            keep = keep * gl.exp2(shift - top)
            row_sum = row_sum * keep + gl.exp2(sink - top)
            shift = top
        total = gl.where(empty, 1.0, row_sum)
        inverse = gl.div_rn(keep, total) * out_factor
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # The query tile is done with: the rows pass through it, to be stored 16 bytes at a time.
        q.store(acc.to(q.dtype))
        result = q.load(OUT_LAYOUT)
        out_rows = OWN * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT))
        columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT_LAYOUT))
        out_tokens = (first_row + out_rows // PACK).to(gl.int64)
        pointers = out + out_tokens * OUT_TOKEN_STRIDE + (head + out_rows % PACK) * OUT_HEAD_STRIDE
        gl.store(
            pointers[:, None] + columns[None, :],
            result.to(out.dtype.element_ty),
            mask=(out_rows < tokens * PACK)[:, None],
        )
        if lse is not None:
            row_lse = gl.where(empty, float("-inf"), (shift + gl.log2(total)) * _LN2)
            lse_rows = OWN * 64 + in_rows
            lse_tokens = (first_row + lse_rows // PACK).to(gl.int64)
            lse_pointers = lse + lse_tokens * NUM_HEADS + head + lse_rows % PACK
            gl.store(lse_pointers, row_lse, mask=lse_rows < tokens * PACK)
        fence_async_shared()
        mbarrier.arrive(q_empty.index(slot), count=1)
    if PING_PONG and OWN == 0:
        take_turn(OWN)


@gluon.jit
def zero_padding(
    out, lse, query_start_loc, num_seqs, num_tokens, NUM_HEADS: gl.constexpr, HEAD_SIZE: gl.constexpr,
    OUT_TOKEN_STRIDE: gl.constexpr, OUT_HEAD_STRIDE: gl.constexpr,
):  # fmt: skip
    """Writes what rows of padding hold: zeros, and a log-sum-exp of -inf."""
    LANES: gl.constexpr = HEAD_SIZE // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([32, HEAD_SIZE], gl.float32, layout).to(out.dtype.element_ty)
    start = gl.load(query_start_loc + num_seqs)
    for base in range(start * NUM_HEADS + gl.program_id(0) * 32, num_tokens * NUM_HEADS, gl.num_programs(0) * 32):
        rows = base + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
        tokens = (rows // NUM_HEADS).to(gl.int64)
        heads = rows % NUM_HEADS
        live = rows < num_tokens * NUM_HEADS
        pointers = out + tokens * OUT_TOKEN_STRIDE + heads * OUT_HEAD_STRIDE
        gl.store(pointers[:, None] + columns[None, :], zeros, mask=live[:, None])
        if lse is not None:
            empty = gl.full([32], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            gl.store(lse + tokens * NUM_HEADS + heads, empty, mask=live)
