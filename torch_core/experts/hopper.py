"""The product of many token rows with their experts' matrices on Hopper: copies and products overlap."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_core.device.gluon_names import async_load, reinterpret
from torch_core.experts.kernel import gated

__all__ = ["ROWS", "STEPS", "WIDTH", "hopper_expert_product_kernel"]

#: Rows of a tile, elements of a row that one step multiplies, columns of the kernel that a tile multiplies.
ROWS = gl.constexpr(128)
STEPS = gl.constexpr(64)
WIDTH = gl.constexpr(256)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_PAIR = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
# Each thread has 16 bytes of a row, eight neighbours have all of it.
_COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))
_STORES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class _Work(NamedTuple):
    """What a program multiplies, and where the result goes.

    Attributes:
        rows: token rows by pointer, or sorted ones by descriptor.
        weights: descriptor of all experts' rows.
        bias: of each expert's columns, or None.
        sorted_ids, tile_experts: as `align_experts_kernel` leaves them.
        out: sorted rows.
        row_stride: of `rows`.
        items: tiles of rows times tiles of columns.
    """

    rows: Any
    weights: Any
    bias: Any
    sorted_ids: Any
    tile_experts: Any
    out: Any
    row_stride: Any
    items: Any


class _Room(NamedTuple):
    """Rings in shared memory: tiles of rows and of weights, and barriers of both that say what is full and empty."""

    rows: Any
    weights: Any
    full: Any
    empty: Any


@gluon.jit
def hopper_expert_product_kernel(
    rows,
    weights,
    bias,
    sorted_ids,
    tile_experts,
    out,
    num_tiles,
    row_stride,
    PAIRS_PER_ROW: gl.constexpr,
    IN: gl.constexpr,
    OUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tile `i` of ROWS rows of `out` is the product of the pairs in `sorted_ids` there with the kernel of its expert.

    A program of a persistent grid: two warpgroups of 64 rows multiply, one warp loads weights by the copy engine. With
    an ACTIVATION the kernel's columns are gate and up, seen as [2, experts * IN, OUT]; two warps gather the
    rows of tokens, and the result is `act(gate) * up`. Without one the rows are sorted already, and come by the copy
    engine, too. Rows of padding in a tile hold anything.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    dtype: gl.constexpr = out.dtype.element_ty
    row_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEPS], _TILE)
    if GATED:
        weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2, STEPS, WIDTH // 2], _PAIR)
    else:
        weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, STEPS, WIDTH], _TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # The warp of the copy engine, and each thread that gathers.
        mbarrier.init(full.index(i), count=65 if GATED else 1)
        mbarrier.init(empty.index(i), count=2)
    live_tiles = gl.load(tile_experts + num_tiles)
    items = live_tiles * ((OUT + COLUMNS - 1) // COLUMNS)
    work = _Work(rows, weights, bias, sorted_ids, tile_experts, out, row_stride, items)
    room = _Room(row_tiles, weight_tiles, full, empty)
    if GATED:
        gl.warp_specialize(
            [
                (_multiply, (0, work, room, IN, OUT, ACTIVATION)),
                (_multiply, (1, work, room, IN, OUT, ACTIVATION)),
                (_gather_rows, (work, room, PAIRS_PER_ROW, IN, OUT)),
                (_load_weights, (work, room, IN, OUT, ACTIVATION)),
            ],
            [4, 2, 1],
            [208, 88, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, work, room, IN, OUT, ACTIVATION)),
                (_multiply, (1, work, room, IN, OUT, ACTIVATION)),
                (_load_weights, (work, room, IN, OUT, ACTIVATION)),
            ],
            [4, 1],
            [232, 40],
        )


@gluon.jit
def _multiply(OWN: gl.constexpr, work, room, IN: gl.constexpr, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    """One warpgroup: the rows 64 * OWN and on of each tile."""
    GATED: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = room.full.shape[0]
    TURNS: gl.constexpr = IN // STEPS
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile = item // TILES
        column = item % TILES * COLUMNS
        first = tile * ROWS + OWN * 64
        # The last tile of an expert has half its rows on average: half the products will do for it then.
        if gl.load(work.sorted_ids + first) >= 0:
            acc = gl.zeros([64, WIDTH], gl.float32, _PRODUCT)
            for i in range(TURNS):
                slot = step % STAGES
                mbarrier.wait(room.full.index(slot), (step // STAGES) & 1)
                if GATED:
                    fence_async_shared()
                left = room.rows.index(slot).slice(OWN * 64, 64)
                right = room.weights.index(slot)
                if GATED:
                    right = gate_and_up(right)
                acc = warpgroup_mma(left, right, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if i > 0:
                    gl.thread_barrier()
                    mbarrier.arrive(room.empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(room.empty.index((step + STAGES - 1) % STAGES), count=1)
            _store_tile(acc, gl.load(work.tile_experts + tile), first, column, work, OUT, ACTIVATION)
        else:
            for _ in range(TURNS):
                slot = step % STAGES
                mbarrier.wait(room.full.index(slot), (step // STAGES) & 1)
                mbarrier.arrive(room.empty.index(slot), count=1)
                step += 1


@gluon.jit
def gate_and_up(tile):
    """A tile [2, STEPS, WIDTH // 2] as [STEPS, WIDTH], 64 columns of the gate beside as many of up, twice.

    The copy engine puts 64 columns of all rows behind one another, so that nothing moves.
    """
    return reinterpret(tile, tile.dtype, STEPS, WIDTH, _TILE)


@gluon.jit
def _store_tile(acc, expert, first, column, work, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    if ACTIVATION is None:
        halves = acc.reshape([64, 2, WIDTH // 2]).permute(0, 2, 1)
        first_half, second_half = gl.split(halves)
        _store_half(first_half, None, expert, first, column, work, OUT, ACTIVATION)
        _store_half(second_half, None, expert, first, column + WIDTH // 2, work, OUT, ACTIVATION)
    else:
        gate, up = gl.split(acc.reshape([64, 2, 2, 64]).permute(0, 1, 3, 2))
        _store_half(
            gate.reshape([64, WIDTH // 2]), up.reshape([64, WIDTH // 2]), expert, first, column, work, OUT, ACTIVATION
        )


@gluon.jit
def _store_half(x, up, expert, first, column, work, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    """Stores WIDTH // 2 columns."""
    dtype: gl.constexpr = work.out.dtype.element_ty
    HALF: gl.constexpr = WIDTH // 2
    if work.bias is not None:
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, x.type.layout))
        BIASES: gl.constexpr = OUT if ACTIVATION is None else 2 * OUT
        added = work.bias + expert.to(gl.int64) * BIASES + columns
        x += gl.load(added, mask=columns < OUT, other=0.0).to(gl.float32)[None, :]
        if ACTIVATION is not None:
            up += gl.load(added + OUT, mask=columns < OUT, other=0.0).to(gl.float32)[None, :]
    if ACTIVATION is not None:
        x = gated(x, up, ACTIVATION)
    result = gl.convert_layout(x.to(dtype), _STORES)
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, _STORES))
    columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, _STORES))
    gl.store(work.out + rows.to(gl.int64)[:, None] * OUT + columns[None, :], result, mask=(columns < OUT)[None, :])


@gluon.jit
def _load_weights(work, room, IN: gl.constexpr, OUT: gl.constexpr, ACTIVATION: gl.constexpr):
    """One warp: the weights of each step, and the rows where they are sorted."""
    GATED: gl.constexpr = ACTIVATION is not None
    COLUMNS: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = room.full.shape[0]
    BYTES: gl.constexpr = 2 * STEPS * (WIDTH if GATED else WIDTH + ROWS)
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile = item // TILES
        column = item % TILES * COLUMNS
        row = gl.load(work.tile_experts + tile) * IN
        for i in range(IN // STEPS):
            slot = step % STAGES
            full = room.full.index(slot)
            mbarrier.wait(room.empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            if GATED:
                async_load(work.weights, [0, row + i * STEPS, column], full, room.weights.index(slot))
            else:
                async_load(work.rows, [tile * ROWS, i * STEPS], full, room.rows.index(slot))
                async_load(work.weights, [row + i * STEPS, column], full, room.weights.index(slot))
            step += 1


@gluon.jit
def _gather_rows(work, room, PAIRS_PER_ROW: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr):
    """Two warps: the rows of tokens that a tile has, which lie anywhere."""
    TILES: gl.constexpr = (OUT + WIDTH // 2 - 1) // (WIDTH // 2)
    STAGES: gl.constexpr = room.full.shape[0]
    lanes = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _COPIES))
    elements = gl.arange(0, STEPS, layout=gl.SliceLayout(0, _COPIES))
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        # A row of padding is that of the first pair: no row of a product depends on another.
        pairs = gl.maximum(gl.load(work.sorted_ids + item // TILES * ROWS + lanes), 0)
        sources = work.rows + (pairs // PAIRS_PER_ROW).to(gl.int64)[:, None] * work.row_stride + elements[None, :]
        for _ in range(IN // STEPS):
            slot = step % STAGES
            mbarrier.wait(room.empty.index(slot), ((step // STAGES) & 1) ^ 1)
            async_copy.async_copy_global_to_shared(room.rows.index(slot), sources)
            async_copy.mbarrier_arrive(room.full.index(slot), increment_count=False)
            sources += STEPS
            step += 1
