"""Many rows times gate and up on Hopper, with the activation behind: copies and products overlap."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.device.gluon_names import async_load
from torch_core.device.hopper_turns import make_ring, open_slot

__all__ = ["COLUMNS", "ROWS", "STEPS", "hopper_gated_rows_kernel"]

#: Rows and columns of a tile of the result, elements of a row that one step multiplies.
ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(128)
STEPS = gl.constexpr(64)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


class _Work(NamedTuple):
    """What a program multiplies: descriptors of rows and weights, the result, and how many tiles there are."""

    rows: Any
    weights: Any
    out: Any
    num_rows: Any
    row_tiles: Any
    items: Any


@gluon.jit
def hopper_gated_rows_kernel(rows, weights, out, num_rows, IN: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr):
    """`out` is `silu(rows @ gate) * (rows @ up)`. Grid: programs of a persistent grid.

    One warp fills a ring of tiles by the copy engine, two warpgroups of 64 rows multiply. The tiles of rows of a tile
    of columns follow one another: weights come from memory once.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEPS], _TILE), STAGES)
    weight_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, STEPS, COLUMNS], _TILE)
    for i in gl.static_range(STAGES):
        open_slot(ring, i, 2)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    work = _Work(rows, weights, out, num_rows, row_tiles, row_tiles * ((OUT + COLUMNS - 1) // COLUMNS))
    gl.warp_specialize(
        [
            (_multiply, (0, work, ring, weight_tiles, IN, OUT)),
            (_multiply, (1, work, ring, weight_tiles, IN, OUT)),
            (_load_tiles, (work, ring, weight_tiles, IN, OUT)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _multiply(OWN: gl.constexpr, work, ring, weight_tiles, IN: gl.constexpr, OUT: gl.constexpr):
    """One warpgroup: the rows 64 * OWN and on of each tile."""
    STAGES: gl.constexpr = ring.full.shape[0]
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        gate = gl.zeros([64, COLUMNS], gl.float32, _PRODUCT)
        up = gl.zeros([64, COLUMNS], gl.float32, _PRODUCT)
        for i in range(IN // STEPS):
            slot = step % STAGES
            mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
            left = ring.tiles.index(slot).slice(OWN * 64, 64)
            gate = warpgroup_mma(left, weight_tiles.index(2 * slot), gate, is_async=True)
            up = warpgroup_mma(left, weight_tiles.index(2 * slot + 1), up, is_async=True)
            # The products before these are done with their slot.
            gate, up = warpgroup_mma_wait(2, deps=(gate, up))
            if i > 0:
                gl.thread_barrier()
                mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        gate, up = warpgroup_mma_wait(0, deps=(gate, up))
        gl.thread_barrier()
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
        result = gate / (1.0 + gl.exp2(-1.4426950408889634 * gate)) * up
        rows = item % work.row_tiles * ROWS + OWN * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _PRODUCT))
        columns = item // work.row_tiles * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _PRODUCT))
        places = work.out + rows.to(gl.int64)[:, None] * OUT + columns[None, :]
        inside = (rows < work.num_rows)[:, None] & (columns < OUT)[None, :]
        gl.store(places, result.to(work.out.dtype.element_ty), mask=inside)


@gluon.jit
def _load_tiles(work, ring, weight_tiles, IN: gl.constexpr, OUT: gl.constexpr):
    """One warp: rows and weights of each step."""
    STAGES: gl.constexpr = ring.full.shape[0]
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        row = item % work.row_tiles * ROWS
        column = item // work.row_tiles * COLUMNS
        for i in range(IN // STEPS):
            slot = step % STAGES
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * STEPS * (ROWS + 2 * COLUMNS))
            async_load(work.rows, [row, i * STEPS], full, ring.tiles.index(slot))
            async_load(work.weights, [i * STEPS, column], full, weight_tiles.index(2 * slot))
            async_load(work.weights, [i * STEPS, OUT + column], full, weight_tiles.index(2 * slot + 1))
            step += 1
