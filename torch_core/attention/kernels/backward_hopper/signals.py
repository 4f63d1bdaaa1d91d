"""How the warpgroups of the Hopper backward kernel hand score gradients to the one that works out d_query, and how
programs take turns to add to it.

Within a program by hardware barriers: unlike barriers in shared memory, they need no meeting of those that arrive.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "await_full",
    "await_room",
    "await_turn",
    "await_weights",
    "pass_turn",
    "pass_turns",
    "signal_full",
    "signal_room",
    "signal_weights",
    "take_turns",
]

# Triton takes the first few of the sixteen for itself. Two slots are full; for each of two roles two have room.
_FULL = gl.constexpr(8)
_ROOM = gl.constexpr(10)
_TURN = gl.constexpr(14)
# By the warpgroups that add to the queries' gradients; two warps take and pass the turns.
_TURN_SYNC = gl.constexpr((None, "@p bar.sync $1, 192;", "@p bar.sync $1, 320;"))
_TURN_ARRIVE = gl.constexpr((None, "@p bar.arrive $1, 192;", "@p bar.arrive $1, 320;"))
_ADDED_SYNC = gl.constexpr((None, "@p bar.sync $1, 160;", "@p bar.sync $1, 288;"))
_ADDED_ARRIVE = gl.constexpr((None, "@p bar.arrive $1, 160;", "@p bar.arrive $1, 288;"))
# Where a single warpgroup writes slots, those of the other one are for the weights that it gets.
_WEIGHTS = gl.constexpr(12)
# By the warpgroups that write a slot, the one that reads it besides.
_ARRIVE = gl.constexpr((None, "@p bar.arrive $1, 256;", "@p bar.arrive $1, 384;"))
_SYNC = gl.constexpr((None, "@p bar.sync $1, 256;", "@p bar.sync $1, 384;"))


@gluon.jit
def signal_full(step, WRITERS: gl.constexpr):
    """One of the warpgroups that write has written its share of the step's slot."""
    ARRIVE: gl.constexpr = _ARRIVE[WRITERS]
    _barrier(_FULL + step % 2, 1, ARRIVE)


@gluon.jit
def await_full(step, WRITERS: gl.constexpr):
    """The step's slot is written."""
    SYNC: gl.constexpr = _SYNC[WRITERS]
    _barrier(_FULL + step % 2, 1, SYNC)


@gluon.jit
def signal_weights(step):
    """The step's weights are written."""
    _barrier(_WEIGHTS + step % 2, 1, "@p bar.arrive $1, 256;")


@gluon.jit
def await_weights(step):
    """The step's weights may be read."""
    _barrier(_WEIGHTS + step % 2, 1, "@p bar.sync $1, 256;")


@gluon.jit
def signal_room(step, steps, OWN: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The step's slot may be written again by the role OWN, if there is a step that does."""
    ARRIVE: gl.constexpr = _ARRIVE[WARPGROUPS]
    _barrier(_ROOM + 2 * OWN + step % 2, step + 2 < steps, ARRIVE)


@gluon.jit
def await_room(step, OWN: gl.constexpr, WARPGROUPS: gl.constexpr):
    """The step's slot may be written by the role OWN, of as many WARPGROUPS."""
    SYNC: gl.constexpr = _SYNC[WARPGROUPS]
    _barrier(_ROOM + 2 * OWN + step % 2, step >= 2, SYNC)


@gluon.jit
def await_turn(ADDERS: gl.constexpr):
    """Waits until `take_turns` says that this program, with ADDERS warpgroups, may add to the next tile of queries."""
    SYNC: gl.constexpr = _TURN_SYNC[ADDERS]
    _barrier(_TURN, 1, SYNC)


@gluon.jit
def pass_turn(ADDERS: gl.constexpr):
    """This warpgroup, one of ADDERS, has added to a tile of queries."""
    ARRIVE: gl.constexpr = _ADDED_ARRIVE[ADDERS]
    _barrier(_TURN + 1, 1, ARRIVE)


@gluon.jit
def take_turns(item, gradients, SHAPE: gl.constexpr):
    """One warp: waits until all earlier tiles of keys have added to a tile of queries.

    Apart from the warpgroup that adds: in a loop that may diverge, its products would lose their uniform registers.
    """
    if gradients.turns is not None:
        SYNC: gl.constexpr = _TURN_SYNC[SHAPE.ADDERS]
        for step in range((item.end - item.start) * SHAPE.GROUP):
            counter, tile = _turn_counter(step, item, gradients, SHAPE)
            turn = item.tile - gl.maximum(item.lowest + tile * SHAPE.BLOCK_M, 0) // SHAPE.BLOCK_N
            _counter(counter, turn, "again: ld.acquire.gpu.global.s32 v, [$1]; setp.lt.s32 p, v, $2; @p bra again;")
            _barrier(_TURN, 1, SYNC)


@gluon.jit
def pass_turns(item, gradients, SHAPE: gl.constexpr):
    """One warp: counts the tiles of keys that have added to a tile of queries; it alone waits until the sums are there.

    It falls at most one step behind the warpgroup that adds, which needs its word for a turn too.
    """
    if gradients.turns is not None:
        ARRIVE: gl.constexpr = _TURN_ARRIVE[SHAPE.ADDERS]
        SYNC: gl.constexpr = _ADDED_SYNC[SHAPE.ADDERS]
        steps = (item.end - item.start) * SHAPE.GROUP
        _barrier(_TURN, steps, ARRIVE)
        for step in range(steps):
            counter, _ = _turn_counter(step, item, gradients, SHAPE)
            _barrier(_TURN + 1, 1, SYNC)
            _barrier(_TURN, step + 1 < steps, ARRIVE)
            _counter(
                counter, 1,
                "mov.u32 v, %laneid; setp.eq.u32 p, v, 0; fence.acq_rel.gpu; @p red.release.gpu.global.add.u32 [$1], "
                "$2;",
            )  # fmt: skip


@gluon.jit
def _turn_counter(step, item, gradients, SHAPE: gl.constexpr):
    tile = item.end - 1 - step // SHAPE.GROUP
    head = item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP
    return gradients.turns + head * gradients.query_tiles + item.first_tile + tile, tile


@gluon.jit
def _counter(counter, value, INSTRUCTIONS: gl.constexpr):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .s32 v; " + INSTRUCTIONS + " mov.u32 $0, 0; }", "=r,l,r",
        [counter.to(gl.int64, bitcast=True), gl.to_tensor(value)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _barrier(number, needed, INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; " + INSTRUCTION + " mov.u32 $0, 0; }", "=r,r,r",
        [gl.to_tensor(number), gl.to_tensor(needed).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
