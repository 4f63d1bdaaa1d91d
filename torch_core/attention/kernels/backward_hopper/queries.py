"""The queries' gradients on Hopper: the warpgroup that works them out, its signals, and the turns of programs.

Roles of a program signal by hardware barriers: unlike barriers in shared memory, they need no meeting of the threads
that arrive.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

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
def query_gradients(item, rings, gradients, SHAPE: gl.constexpr):
    """One warpgroup: adds this tile of keys' share to the gradient of each tile of queries, in float32.

    Tiles of keys add in their order, so that the bits are the same every time: programs start in that order and go from
    the last queries to the first, so that a program finds the one before it a tile of queries ahead. Without turns they
    add at once.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WRITERS: gl.constexpr = 1 if rings.weights is not None else 2
    ROLES: gl.constexpr = SHAPE.BLOCK_N // SHAPE.ROLE_KEYS
    # Columns at a time, as many as this warpgroup's registers hold.
    PART: gl.constexpr = 4096 // BLOCK_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    k = rings.key.tiles.index(0)
    steps = (item.end - item.start) * SHAPE.GROUP
    mbarrier.wait(rings.key.full.index(0), 0)
    for step in range(steps):
        sums = query_sums(step, item, gradients, SHAPE)
        _await_full(step, WRITERS)
        ds = rings.d_scores.index(step % 2).permute((1, 0))
        for part in gl.static_range(HEAD_SIZE // PART):
            zeros = gl.zeros([BLOCK_M, PART], gl.float32, LAYOUT)
            dq = warpgroup_mma(ds, k.slice(part * PART, PART, 1), zeros, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == HEAD_SIZE // PART - 1:
                for i in gl.static_range(ROLES):
                    _signal_room(step, steps, i, WRITERS // ROLES)
            if part == 0 and gradients.turns is not None:
                await_turn(SHAPE.ADDERS)
            add_columns(sums, part * PART, dq)
            if HEAD_SIZE // PART > 2 or SHAPE.ROLE_KEYS == 128:
                _finish_part()
        if gradients.turns is not None:
            pass_turn(SHAPE.ADDERS)


@gluon.jit
def query_sums(step, item, gradients, SHAPE: gl.constexpr):
    """A pointer to the sums of the step's queries, as the matrix units leave them: a thread adds 16 bytes at a time."""
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


@gluon.jit
def signal_full(step, WRITERS: gl.constexpr):
    """One of the warpgroups that write has written its share of the step's slot."""
    ARRIVE: gl.constexpr = _ARRIVE[WRITERS]
    _barrier(_FULL + step % 2, 1, ARRIVE)


@gluon.jit
def _await_full(step, WRITERS: gl.constexpr):
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
def _signal_room(step, steps, OWN: gl.constexpr, WARPGROUPS: gl.constexpr):
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
