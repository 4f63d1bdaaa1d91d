"""The warpgroups of the kernel for few rows: each attends to every other tile, and loads the next ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.device.gluon_names import reinterpret, thread_barrier
from torch_core.device.hopper_latents import BLOCK_N, ROPE, places_of, slots_of, store_sums, visible_latents
from torch_core.device.mask import LOG2E
from torch_core.latent.kernels.mla_few.loads import (
    COLUMNS,
    GATHERED,
    GROUP,
    GROUPS,
    load_query,
    load_scales,
    load_tile,
    zero_behind,
)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# A thread reads 4 bytes of each of 16 tokens: the threads of a group of tokens and elements as in an operand.
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [64, 128],
    )
)
_CODES_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_ROPE_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_LEFT_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
# Scales of packed rows below this are taken for it where weights are sized.
_LEAST_SCALE = gl.constexpr(2.0**-64)


@gluon.jit
def attend(
    OWN: gl.constexpr, work, scale, window_right, source, room, results, STRIDES: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: attends to the tiles OWN, OWN + 2, ...; the first one merges and stores."""
    IN_COLUMNS: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    IN_KEYS: gl.constexpr = gl.SliceLayout(1, _PRODUCT)
    SLOTS: gl.constexpr = room.full.shape[0]
    # Each has slots of its own. Of a slot that both use in turns, one sees every other phase: where a tile comes late,
    # it would take the end of the phase before it for the tile behind it.
    FIRSTS: gl.constexpr = (SLOTS + 1) // 2
    COUNT: gl.constexpr = SLOTS // 2 if OWN == 1 else FIRSTS
    if OWN == 0:
        for i in gl.static_range(SLOTS):
            if i < work.tiles:
                boxes = places_of(work, source.table, i, GATHERED, SHAPE)
                load_tile(i % 2 * FIRSTS + i // 2, boxes, source, room, SHAPE)
        load_query(work, source, room, STRIDES, SHAPE)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(room.ready, count=1)
    columns = work.first_row + gl.arange(0, COLUMNS, layout=IN_COLUMNS)
    tokens = columns // SHAPE.NUM_HEADS
    last, full_end = visible_latents(tokens, work, window_right, SHAPE)
    if source.packed is not None:
        scales = load_scales(work, source, OWN, IN_KEYS, SHAPE)
    mbarrier.wait(room.ready, 0)
    worth = room.states.index(2).load(IN_COLUMNS)
    factor = scale * LOG2E
    column_max = gl.full([COLUMNS], float("-inf"), gl.float32, IN_COLUMNS)
    sums = gl.zeros([BLOCK_N, COLUMNS], gl.float32, _PRODUCT)
    zeros = gl.zeros([GROUP, COLUMNS], gl.float32, _PRODUCT)
    acc_0, acc_1, acc_2, acc_3 = zeros, zeros, zeros, zeros
    for step in range(OWN, work.tiles, 2):
        slot = OWN * FIRSTS + step // 2 % COUNT
        boxes = places_of(work, source.table, step + 2 * COUNT, GATHERED, SHAPE)
        position = work.start + step * BLOCK_N
        live = work.end - position
        mbarrier.wait(room.full.index(slot), step // 2 // COUNT & 1)
        if SHAPE.BOX == 0:
            # Threads copied the tile, and zeros for rows that no token owns.
            fence_async_shared()
        elif live < BLOCK_N:
            # Rows that no token owns may be NaN, and their weight of 0 would not help.
            zero_behind(slot, live, room)
            thread_barrier()
        if source.packed is None:
            s = _scores(slot, room)
            # Two groups are converted while the products run: packed rows have no registers left for that.
            part_0, part_1 = _latents(slot, 0, room), _latents(slot, 1, room)
            s = _summed(warpgroup_mma_wait(0, deps=(s,))) * worth[None, :]
            top = gl.max(_masked(s, position, last, full_end), 0) * factor
        else:
            s = _scaled(_packed_scores(slot, room), scales, worth)
            peak = gl.maximum(gl.maximum(scales[0], scales[1]), gl.maximum(scales[2], scales[3]))
            # Weights times scales are at most 1 for all scales.
            sized = s * factor + gl.log2(gl.maximum(peak, _LEAST_SCALE))[:, None]
            top = gl.max(_masked(sized, position, last, full_end), 0)
        s = _masked(s, position, last, full_end)
        new_max = gl.maximum(column_max, top)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s * factor - shift[None, :])
        keep = gl.exp2(column_max - shift)
        column_max = new_max
        sums = sums * keep[None, :] + p
        if source.packed is None:
            weights = (room.weights.index(OWN),) * 4
            weights[0].store(p.to(gl.float16))
        else:
            weights = (
                room.weights.index(4 * OWN),
                room.weights.index(4 * OWN + 1),
                room.weights.index(4 * OWN + 2),
                room.weights.index(4 * OWN + 3),
            )
            for i in gl.static_range(GROUPS):
                weights[i].store((p * scales[i][:, None]).to(gl.float16))
            scales = load_scales(work, source, step + 2, IN_KEYS, SHAPE)
        fence_async_shared()
        acc_0, acc_1 = acc_0 * keep[None, :], acc_1 * keep[None, :]
        acc_2, acc_3 = acc_2 * keep[None, :], acc_3 * keep[None, :]
        thread_barrier()
        if source.packed is not None:
            part_0, part_1 = _latents(slot, 0, room), _latents(slot, 1, room)
        acc_0 = warpgroup_mma(part_0, weights[0], acc_0, is_async=True)
        acc_1 = warpgroup_mma(part_1, weights[1], acc_1, is_async=True)
        # No more than two groups stay in registers.
        acc_0 = warpgroup_mma_wait(1, deps=(acc_0,))
        acc_2 = warpgroup_mma(_latents(slot, 2, room), weights[2], acc_2, is_async=True)
        acc_1 = warpgroup_mma_wait(1, deps=(acc_1,))
        acc_3 = warpgroup_mma(_latents(slot, 3, room), weights[3], acc_3, is_async=True)
        acc_2, acc_3 = warpgroup_mma_wait(0, deps=(acc_2, acc_3))
        # Every warp is done with the tile and the weights before they are written again.
        thread_barrier()
        if step + 2 * COUNT < work.tiles:
            load_tile(slot, boxes, source, room, SHAPE)

    column_sum = gl.sum(sums, 0)
    accs = (acc_0, acc_1, acc_2, acc_3)
    # Where the last tile of the second warpgroup lay, or would.
    place = FIRSTS + (gl.maximum(work.tiles // 2, 1) - 1) % (SLOTS // 2)
    if OWN == 1:
        for i in gl.static_range(GROUPS):
            _left(place, i, room).store(accs[i])
        room.states.index(0).store(column_max)
        room.states.index(1).store(column_sum)
        thread_barrier()
        mbarrier.arrive(room.other, count=1)
    else:
        mbarrier.wait(room.other, 0)
        other_max = room.states.index(0).load(IN_COLUMNS)
        new_max = gl.maximum(column_max, other_max)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        keep, keep_other = gl.exp2(column_max - shift), gl.exp2(other_max - shift)
        column_sum = column_sum * keep + room.states.index(1).load(IN_COLUMNS) * keep_other
        ratio = store_sums(new_max, column_sum, columns, tokens, work, results, SHAPE)
        for i in gl.static_range(GROUPS):
            merged = accs[i] * keep[None, :] + _left(place, i, room).load(_PRODUCT) * keep_other[None, :]
            _store(i, merged, ratio, columns, work, results, SHAPE)


@gluon.jit
def _scores(slot, room):
    """Starts the products of a tile and the query."""
    TERMS: gl.constexpr = room.query.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TERMS, 32])
    s = gl.zeros([BLOCK_N, TERMS], gl.float32, layout)
    for i in gl.static_range(GROUPS):
        codes = room.codes.index(GROUPS * slot + i)
        s = warpgroup_mma(codes, room.query.index(i).permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return warpgroup_mma(room.ropes.index(slot), room.query_rope.permute((1, 0)), s, is_async=True)


@gluon.jit
def _packed_scores(slot, room):
    """Starts the products of a packed tile and the query: of each group, which has scales of its own, and the rest."""
    TERMS: gl.constexpr = room.query.shape[1]
    ROPE_TERMS: gl.constexpr = room.query_rope.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TERMS, 32])
    rope_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROPE_TERMS, 16])
    zeros = gl.zeros([BLOCK_N, TERMS], gl.float32, layout)
    products = ()
    for i in gl.static_range(GROUPS):
        q = room.query.index(i).permute((1, 0))
        s = warpgroup_mma(_codes(slot, i, room), q, zeros, use_acc=False, is_async=True)
        products = products + (s,)  # noqa: RUF005 - no starred tuples here
    rope = reinterpret(room.ropes.index(slot), gl.bfloat16, BLOCK_N, ROPE, _ROPE_SHARED)
    start = gl.zeros([BLOCK_N, ROPE_TERMS], gl.float32, rope_layout)
    s = warpgroup_mma(rope, room.query_rope.permute((1, 0)), start, use_acc=False, is_async=True)
    return products + (s,)  # noqa: RUF005 - no starred tuples here


@gluon.jit
def _scaled(products, scales, worth):
    """The scores that `_packed_scores` started."""
    s_0, s_1, s_2, s_3, s = warpgroup_mma_wait(0, deps=products)
    latents = _summed(s_0) * scales[0][:, None] + _summed(s_1) * scales[1][:, None]
    latents += _summed(s_2) * scales[2][:, None] + _summed(s_3) * scales[3][:, None]
    return _summed(s) + latents * worth[None, :]


@gluon.jit
def _summed(s):
    """Scores whose terms stand in columns one behind the other, summed."""
    COUNT: gl.constexpr = s.shape[1] // COLUMNS
    if COUNT > 1:
        first, second = gl.split(s.reshape([BLOCK_N, 2, s.shape[1] // 2]).permute(0, 2, 1))
        s = first + second
    if COUNT > 2:
        first, second = gl.split(s.reshape([BLOCK_N, 2, COLUMNS]).permute(0, 2, 1))
        s = first + second
    return gl.convert_layout(s, _PRODUCT)


@gluon.jit
def _masked(s, position, last, full_end):
    if position + BLOCK_N > full_end:
        keys = position + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _PRODUCT))
        s = gl.where(keys[:, None] <= last[None, :], s, float("-inf"))
    return s


@gluon.jit
def _codes(slot, INDEX: gl.constexpr, room):
    """A group of a tile as e4m3."""
    return reinterpret(room.codes.index(GROUPS * slot + INDEX), gl.float8e4nv, BLOCK_N, GROUP, _CODES_SHARED)


@gluon.jit
def _latents(slot, INDEX: gl.constexpr, room):
    """A group of a tile, element by token, as the operand of a product."""
    part = _codes(slot, INDEX, room).load(_CODES).to(gl.float16)
    part = part.reshape([BLOCK_N, 4, 8, 2, 2]).permute(3, 1, 4, 2, 0).reshape([GROUP, BLOCK_N])
    return gl.convert_layout(part, gl.DotOperandLayout(0, _PRODUCT, 2))


@gluon.jit
def _left(place, INDEX: gl.constexpr, room):
    """The shared memory in which the second warpgroup leaves a group of its sums."""
    return reinterpret(room.codes.index(GROUPS * place + INDEX), gl.float32, GROUP, COLUMNS, _LEFT_SHARED)


@gluon.jit
def _store(INDEX: gl.constexpr, acc, ratio, columns, work, results, SHAPE: gl.constexpr):
    """Stores a group of elements of the rows, finished or with other chunks of their sequence to come."""
    tokens = columns // SHAPE.NUM_HEADS
    heads = columns % SHAPE.NUM_HEADS
    live = (tokens < work.query_len)[None, :]
    places = gl.arange(0, GROUP, layout=gl.SliceLayout(1, _PRODUCT))
    elements = INDEX * GROUP + places // 16 % 4 * 32 + places % 8 * 4 + places // 64 * 2 + places // 8 % 2
    if work.chunks == 1:
        offsets = (work.query_start + tokens).to(gl.int64) * SHAPE.OUT_STRIDES[0] + heads * SHAPE.OUT_STRIDES[1]
        finished = (acc * ratio[None, :]).to(results.output.out.dtype.element_ty)
        gl.store(results.output.out + offsets[None, :] + elements[:, None], finished, mask=live)
    elif results.rows is not None:
        slots = slots_of(work, tokens, heads, SHAPE)
        gl.store(results.rows + slots[None, :] * (GROUPS * GROUP) + elements[:, None], acc, mask=live)
