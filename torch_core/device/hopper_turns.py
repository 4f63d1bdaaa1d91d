"""The waits between warps of a Hopper kernel: rings of tiles, and turns at the matrix units."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Triton takes the first few of the sixteen hardware barriers for itself.
_FIRST_BARRIER = gl.constexpr(8)


class Ring(NamedTuple):
    """Slots in shared memory that some warps fill and others read, over and over."""

    tiles: Any  # The slots, `[slots, ...]` or several tiles for each.
    full: Any  # A barrier for each slot, which completes when the slot is filled.
    # A barrier for each slot, which completes when its readers are done with it; None if no warp waits for it.
    empty: Any


@gluon.jit
def make_ring(tiles, SLOTS: gl.constexpr):
    """The ring of SLOTS slots in `tiles`, which may have more than one tile for each; `open_slot` sets its barriers."""
    return Ring(tiles, make_barriers(SLOTS), make_barriers(SLOTS))


@gluon.jit
def make_barriers(SLOTS: gl.constexpr):
    """Shared memory for as many barriers: those of one side of a ring, where the other side has none.

    Each initialised barrier must be used by a role. The compiler reuses the memory of an unused barrier for the values
    that it passes to the roles, but on the device the barrier still exists, because nothing ends it (PTX ISA,
    mbarrier.inval).
    """
    return gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())


@gluon.jit
def open_slot(ring, index: gl.constexpr, READERS: gl.constexpr = 0):
    """Sets the barriers of a slot that one arrival fills; READERS read it, if a warp waits for them."""
    mbarrier.init(ring.full.index(index), count=1)
    if ring.empty is not None:
        mbarrier.init(ring.empty.index(index), count=READERS)


@gluon.jit
def ring_slot(ring, step):
    """Slot and phase of the tile number `step` in a ring of one to four."""
    SLOTS: gl.constexpr = ring.full.shape[0]
    if SLOTS == 1:
        return 0, step & 1
    if SLOTS == 2:
        return step & 1, (step >> 1) & 1
    if SLOTS == 3:
        return step % 3, (step // 3) & 1
    return step & 3, (step >> 2) & 1


@gluon.jit
def take_turn(OWN: gl.constexpr):
    """Waits until this warpgroup may issue its products: the softmax of the others fills the time between."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,n", [OWN + _FIRST_BARRIER], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(OWN: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Lets the next warpgroup issue its products."""
    following: gl.constexpr = (OWN + 1) % WARPGROUPS
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,n", [following + _FIRST_BARRIER], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def skip_tiles(start, end, keys, values, step, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Lets tiles [start, end) of both rings pass, which only the other warpgroups need; returns the next step."""
    for _ in range(start, end):
        stage, phase = ring_slot(keys, step)
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.arrive(keys.empty.index(stage), count=1)
        mbarrier.wait(values.full.index(stage), phase)
        mbarrier.arrive(values.empty.index(stage), count=1)
        if SHAPE.PING_PONG:
            take_turn(OWN)
            pass_turn(OWN, SHAPE.WARPGROUPS)
        step += 1
    return step
