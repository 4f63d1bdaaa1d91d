"""The warpgroup of the Hopper backward kernel that works out the queries' gradients."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.backward_hopper.signals import await_full, await_turn, pass_turn, signal_room

__all__ = ["query_gradients"]


@gluon.jit
def query_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: adds what this tile of keys gives to the gradient of each tile of queries, in float32.

    The sums lie in memory as the matrix units leave them, so that a thread adds 16 bytes at a time. Tiles of keys add
    in their order, so that the bits are the same every time: programs start in that order and go from the last queries
    to the first, so that a program finds the one before it a tile of queries ahead. Without turns they add at once.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    GROUP: gl.constexpr = SHAPE.GROUP
    WRITERS: gl.constexpr = 1 if rings.weights is not None else 2
    # Columns at a time: what this warpgroup's registers hold.
    PART: gl.constexpr = 4096 // BLOCK_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    k = rings.key.tiles.index(0)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))
    thread = (rows // 16 * 32 + rows % 8 * 4)[:, None] + (columns % 8 // 2)[None, :]
    offsets = thread * 4 + (columns // 8 * (BLOCK_M * 8))[None, :]
    steps = (item.end - item.start) * GROUP
    mbarrier.wait(rings.key.full.index(0), 0)
    for step in range(steps):
        tile = item.end - 1 - step // GROUP
        place = (item.kv_head * GROUP + step % GROUP) * gradients.query_tiles + item.first_tile + tile
        sums = gradients.query_sums + place.to(gl.int64) * (BLOCK_M * HEAD_SIZE)
        await_full(step, WRITERS)
        ds = rings.d_scores.index(step % 2).permute((1, 0))
        for part in gl.static_range(HEAD_SIZE // PART):
            zeros = gl.zeros([BLOCK_M, PART], gl.float32, LAYOUT)
            dq = warpgroup_mma(ds, k.slice(part * PART, PART, 1), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == HEAD_SIZE // PART - 1:
                for i in gl.static_range(WRITERS):
                    signal_room(step, steps, i)
            if part == 0 and gradients.turns is not None:
                await_turn()
            _add(sums + part * (BLOCK_M * PART) + offsets, dq)
            if HEAD_SIZE // PART > 2:
                _finish_part()
        if gradients.turns is not None:
            pass_turn()


@gluon.jit
def _add(pointers, values):
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
