"""The product of many rows with gates and their activation on Hopper: copies and products overlap."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.device.gluon_names import async_load, thread_barrier
from torch_core.device.hopper_turns import make_ring, open_slot

#: Rows of a warpgroup's tile, columns of a tile, elements of a row that one step multiplies.
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(256)
STEPS = gl.constexpr(64)

# Half a tile's columns are gates, the others are what they are multiplied with.
_HALF = gl.constexpr(COLUMNS.value // 2)
_LOG2_E = gl.constexpr(1.4426950408889634)
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Whole rows of a result, 16 bytes a thread.
_STORES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class _Work(NamedTuple):
    """The operands of a program, and the destination of its result."""

    x: Any  # x, kernel: descriptors of the rows and of the weights.
    kernel: Any
    out: Any
    num_rows: Any
    row_tiles: Any
    items: Any


@gluon.jit
def hopper_gated_product_kernel(
    x,
    kernel,
    out,
    num_rows,
    IN: gl.constexpr,
    OUT: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """`out` is silu of the left half of `x @ kernel` times its right half, OUT columns each.

    A program of a persistent grid: WARPGROUPS of 64 rows multiply, and the first of them fills a ring of tiles by the
    copy engine. GROUP tiles of rows run side by side, for the L2 cache.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, ROWS, STEPS], _TILE), STAGES)
    weights = gl.allocate_shared_memory(dtype, [STAGES, STEPS, COLUMNS], _TILE)
    for i in gl.static_range(STAGES):
        open_slot(ring, i, WARPGROUPS)
    row_tiles = (num_rows + WARPGROUPS * ROWS - 1) // (WARPGROUPS * ROWS)
    work = _Work(x, kernel, out, num_rows, row_tiles, row_tiles * ((OUT + _HALF - 1) // _HALF))
    if WARPGROUPS == 1:
        _multiply(0, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)),
                (_multiply, (1, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)),
            ],
            [4],
            [240],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)),
                (_multiply, (1, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)),
                (_multiply, (2, work, ring, weights, IN, OUT, WARPGROUPS, GROUP)),
            ],
            [4, 4],
            [168, 168],
        )


@gluon.jit
def _place(item, row_tiles, OUT: gl.constexpr, WARPGROUPS: gl.constexpr, GROUP: gl.constexpr):
    """The first row and the first column of an item."""
    COLUMN_TILES: gl.constexpr = (OUT + _HALF - 1) // _HALF
    first = item // (GROUP * COLUMN_TILES) * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    inside = item % (GROUP * COLUMN_TILES)
    return (first + inside % size) * (WARPGROUPS * ROWS), inside // size * _HALF


@gluon.jit
def _multiply(
    OWN: gl.constexpr, work, ring, weights, IN: gl.constexpr, OUT: gl.constexpr, WARPGROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the rows 64 * OWN and on of each tile; the first one loads, STAGES - 1 steps ahead."""
    STAGES: gl.constexpr = ring.full.shape[0]
    NUM_STEPS: gl.constexpr = IN // STEPS
    step = 0
    # What is loaded next: a step of an item.
    coming = gl.program_id(0)
    if OWN == 0:
        next_row, next_column = _place(coming, work.row_tiles, OUT, WARPGROUPS, GROUP)
        for ahead in gl.static_range(STAGES - 1):
            _load(ahead, ahead, next_row, next_column, work, ring, weights, OUT, WARPGROUPS)
        next_step = gl.to_tensor(STAGES - 1)
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, _PRODUCT)
        for i in range(NUM_STEPS):
            slot = step % STAGES
            mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
            left = ring.tiles.index(slot * WARPGROUPS + OWN)
            acc = warpgroup_mma(left, weights.index(slot), acc, is_async=True)
            # The product before this one is done with its slot.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if i > 0:
                thread_barrier()
                mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
            if OWN == 0:
                if next_step == NUM_STEPS:
                    next_step = 0
                    coming += gl.num_programs(0)
                    next_row, next_column = _place(coming, work.row_tiles, OUT, WARPGROUPS, GROUP)
                if coming < work.items:
                    _load(step + STAGES - 1, next_step, next_row, next_column, work, ring, weights, OUT, WARPGROUPS)
                next_step += 1
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        thread_barrier()
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
        row, column = _place(item, work.row_tiles, OUT, WARPGROUPS, GROUP)
        gate, up = gl.split(acc.reshape([ROWS, 2, _HALF]).permute(0, 2, 1))
        _store(gate / (1.0 + gl.exp2(-_LOG2_E * gate)) * up, row + OWN * ROWS, column, work, OUT)


@gluon.jit
def _load(step, part, row, column, work, ring, weights, OUT: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Starts the copies of step `part` of an item, the step number `step` of the ring."""
    STAGES: gl.constexpr = ring.full.shape[0]
    slot = step % STAGES
    full = ring.full.index(slot)
    mbarrier.wait(ring.empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full, 2 * STEPS * (WARPGROUPS * ROWS + COLUMNS))
    for own in gl.static_range(WARPGROUPS):
        async_load(work.x, [row + own * ROWS, part * STEPS], full, ring.tiles.index(slot * WARPGROUPS + own))
    async_load(work.kernel, [part * STEPS, column], full, weights.index(slot).slice(0, _HALF, 1))
    async_load(work.kernel, [part * STEPS, column + OUT], full, weights.index(slot).slice(_HALF, _HALF, 1))


@gluon.jit
def _store(gated, row, column, work, OUT: gl.constexpr):
    result = gl.convert_layout(gated.to(work.out.dtype.element_ty), _STORES)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _STORES))
    columns = column + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _STORES))
    mask = (rows < work.num_rows)[:, None]
    if OUT % _HALF != 0:
        mask = mask & (columns < OUT)[None, :]
    gl.store(work.out + rows.to(gl.int64)[:, None] * OUT + columns[None, :], result, mask=mask)
