"""What a program adds to the queries' gradients, and the warpgroup of the Hopper backward kernel that works it out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.kernels.backward_hopper.signals import await_full, await_turn, pass_turn, signal_room

__all__ = ["add_columns", "query_gradients", "query_sums"]


@gluon.jit
def query_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: adds what this tile of keys gives to the gradient of each tile of queries, in float32.

    Tiles of keys add in their order, so that the bits are the same every time: programs start in that order and go from
    the last queries to the first, so that a program finds the one before it a tile of queries ahead. Without turns they
    add at once.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WRITERS: gl.constexpr = 1 if rings.weights is not None else 2
    ROLES: gl.constexpr = SHAPE.BLOCK_N // SHAPE.ROLE_KEYS
    # Columns at a time: what this warpgroup's registers hold.
    PART: gl.constexpr = 4096 // BLOCK_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    k = rings.key.tiles.index(0)
    steps = (item.end - item.start) * SHAPE.GROUP
    mbarrier.wait(rings.key.full.index(0), 0)
    for step in range(steps):
        sums = query_sums(step, item, gradients, SHAPE)
        await_full(step, WRITERS)
        ds = rings.d_scores.index(step % 2).permute((1, 0))
        for part in gl.static_range(HEAD_SIZE // PART):
            zeros = gl.zeros([BLOCK_M, PART], gl.float32, LAYOUT)
            dq = warpgroup_mma(ds, k.slice(part * PART, PART, 1), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == HEAD_SIZE // PART - 1:
                for i in gl.static_range(ROLES):
                    signal_room(step, steps, i, WRITERS // ROLES)
            if part == 0 and gradients.turns is not None:
                await_turn(SHAPE.ADDERS)
            add_columns(sums, part * PART, dq)
            if HEAD_SIZE // PART > 2 or SHAPE.ROLE_KEYS == 128:
                _finish_part()
        if gradients.turns is not None:
            pass_turn(SHAPE.ADDERS)


@gluon.jit
def query_sums(step, item, gradients, SHAPE: gl.constexpr):
    """Where the sums of the step's tile of queries lie.

    They lie as the matrix units leave them, so that a thread adds 16 bytes at a time.
    """
    tile = item.end - 1 - step // SHAPE.GROUP
    place = (item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP) * gradients.query_tiles + item.first_tile + tile
    return gradients.query_sums + place.to(gl.int64) * (SHAPE.BLOCK_M * SHAPE.HEAD_SIZE)


@gluon.jit
def add_columns(sums, START: gl.constexpr, values):
    """Adds to the sums of a tile of queries, from the column START on, at once for all programs."""
    BLOCK_M: gl.constexpr = values.shape[0]
    COLUMNS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = values.type.layout
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    thread = (rows // 16 * 32 + rows % 8 * 4)[:, None] + (columns % 8 // 2)[None, :]
    offsets = thread * 4 + (columns // 8 * (BLOCK_M * 8))[None, :]
    pointers = sums + START * BLOCK_M + offsets
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [pointers.to(gl.int64, bitcast=True), values], dtype=gl.int32, is_pure=False,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _finish_part():
    """Keeps the next part's product behind this part's sums: together they do not fit this warpgroup's registers."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
