"""The product of many sorted rows with their experts' matrices on Hopper: copies and products overlap."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.device.gluon_names import async_load, thread_barrier
from torch_core.device.hopper_turns import make_ring, open_slot

#: Rows and columns of a tile, elements of a row that one step multiplies.
ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(256)
STEPS = gl.constexpr(64)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Whole rows of half a tile, 16 bytes a thread.
_STORES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class _Work(NamedTuple):
    """The operands of a program, and the destination of its result."""

    rows: Any  # rows, weights: descriptors of the sorted rows and of all experts' rows.
    weights: Any
    bias: Any  # Bias of each expert's columns, or None.
    sorted_ids: Any  # sorted_ids, tile_experts: as `align_experts_kernel` leaves them.
    tile_experts: Any
    out: Any  # Sorted rows.
    items: Any  # Tiles of rows times tiles of columns.


@gluon.jit
def hopper_expert_product_kernel(
    rows,
    weights,
    bias,
    sorted_ids,
    tile_experts,
    out,
    num_tiles,
    IN: gl.constexpr,
    OUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tile `i` of ROWS rows of `out` is the product of tile `i` of `rows` with the kernel of its expert.

    A program of a persistent grid: one warp fills a ring of tiles by the copy engine, two warpgroups of 64 rows
    multiply. No other row depends on the values of rows of padding.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEPS], _TILE), STAGES)
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, STEPS, COLUMNS], _TILE)
    for i in gl.static_range(STAGES):
        open_slot(ring, i, 2)
    items = gl.load(tile_experts + num_tiles) * ((OUT + COLUMNS - 1) // COLUMNS)
    work = _Work(rows, weights, bias, sorted_ids, tile_experts, out, items)
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
    TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = ring.full.shape[0]
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile = item // TILES
        first = tile * ROWS + OWN * 64
        # The last tile of an expert has half its rows on average: half the products will do for it then.
        if gl.load(work.sorted_ids + first) >= 0:
            acc = gl.zeros([64, COLUMNS], gl.float32, _PRODUCT)
            for i in range(IN // STEPS):
                slot = step % STAGES
                mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
                left = ring.tiles.index(slot).slice(OWN * 64, 64)
                acc = warpgroup_mma(left, weight_tiles.index(slot), acc, is_async=True)
                # The product before this one is done with its slot.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if i > 0:
                    thread_barrier()
                    mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            thread_barrier()
            mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
            column = item % TILES * COLUMNS
            expert = gl.load(work.tile_experts + tile)
            # Half by half: whole rows of a tile would need the room of a slot more.
            halves = gl.split(acc.reshape([64, 2, COLUMNS // 2]).permute(0, 2, 1))
            _store_half(halves[0], expert, first, column, work, OUT)
            _store_half(halves[1], expert, first, column + COLUMNS // 2, work, OUT)
        else:
            for _ in range(IN // STEPS):
                slot = step % STAGES
                mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
                mbarrier.arrive(ring.empty.index(slot), count=1)
                step += 1


@gluon.jit
def _store_half(half, expert, first, column, work, OUT: gl.constexpr):
    if work.bias is not None:
        columns = column + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, half.type.layout))
        added = gl.load(work.bias + expert.to(gl.int64) * OUT + columns, mask=columns < OUT, other=0.0)
        half += added.to(gl.float32)[None, :]
    result = gl.convert_layout(half.to(work.out.dtype.element_ty), _STORES)
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, _STORES))
    columns = column + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, _STORES))
    gl.store(work.out + rows.to(gl.int64)[:, None] * OUT + columns[None, :], result, mask=(columns < OUT)[None, :])


@gluon.jit
def _load_tiles(work, ring, weight_tiles, IN: gl.constexpr, OUT: gl.constexpr):
    """One warp: rows and weights of each step."""
    TILES: gl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = ring.full.shape[0]
    step = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        tile = item // TILES
        column = item % TILES * COLUMNS
        row = gl.load(work.tile_experts + tile) * IN
        for i in range(IN // STEPS):
            slot = step % STAGES
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * STEPS * (ROWS + COLUMNS))
            async_load(work.rows, [tile * ROWS, i * STEPS], full, ring.tiles.index(slot))
            async_load(work.weights, [row + i * STEPS, column], full, weight_tiles.index(slot))
            step += 1
