"""The queries' gradients on Hopper: the warpgroup that works them out, its signals, and the turns of programs.

Roles of a program signal by hardware barriers: unlike barriers in shared memory, they need no meeting of the threads
that arrive.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from torch_core.attention.kernels.backward_hopper.work import query_tile

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
    the last queries to the first, so that a program finds the one before it a tile of queries ahead.
    """
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    WRITERS: gl.constexpr = 1 if rings.weights is not None else 2
    ROLES: gl.constexpr = SHAPE.BLOCK_N // SHAPE.ROLE_KEYS
    # A part has 64 queries and as many columns as this warpgroup's registers hold. Parts of 128 queries and half of the
    # columns read 1.5 times as much shared memory.
    WIDTH: gl.constexpr = SHAPE.PART_WIDTH
    ROW_PARTS: gl.constexpr = BLOCK_M // 64
    PARTS: gl.constexpr = ROW_PARTS * (HEAD_SIZE // WIDTH)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    k = rings.key.tiles.index(0)
    steps = (item.end - item.start) * SHAPE.GROUP
    mbarrier.wait(rings.key.full.index(0), 0)
    for step in range(steps):
        tile = query_tile(item, step, SHAPE)
        turn = _turn(item, tile, SHAPE)
        ends = _ends(tile, item, SHAPE)
        # The last tile of keys adds to what the others have: its products begin with it, so that all of it is on its
        # way at once.
        read = ends & (turn > 0)
        sums = query_sums(step, item, gradients, SHAPE)
        _await_full(step, WRITERS)
        if not SHAPE.RISES:
            await_turn(SHAPE.ADDERS, read)
        for part in gl.static_range(PARTS):
            ds = rings.d_scores.index(step % 2).slice(part % ROW_PARTS * 64, 64, 1).permute((1, 0))
            columns = k.slice(part // ROW_PARTS * WIDTH, WIDTH, 1)
            dq = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
            places = _places(sums, part % ROW_PARTS * 64, part // ROW_PARTS * WIDTH, dq, SHAPE)
            earlier = dq if SHAPE.RISES else _earlier_sums(places, read)
            dq = warpgroup_mma(ds, columns, earlier, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if part == PARTS - 1:
                for i in gl.static_range(ROLES):
                    _signal_room(step, steps, i, WRITERS // ROLES)
            if part == 0:
                await_turn(SHAPE.ADDERS, 1 if SHAPE.RISES else read ^ True)
            if SHAPE.RISES:
                _add_part(places, dq, turn == 0)
            elif ends:
                _store_rounded(
                    dq, part % ROW_PARTS * 64, part // ROW_PARTS * WIDTH, step, tile, item, gradients, SHAPE
                )  # fmt: skip
            else:
                _add_part(places, dq, turn == 0)
            if HEAD_SIZE > 64:
                _finish_part()
        pass_turn(SHAPE.ADDERS)


@gluon.jit
def _earlier_sums(places, read):
    """What earlier tiles of keys have added to a part if it is read, or zeros."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $8, 0; mov.f32 $0, 0f00000000; mov.f32 $1, $0; mov.f32 $2, $0; mov.f32 $3, $0; "
        "@p ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=&f,=&f,=&f,=&f,l,l,l,l,r,r,r,r", [places, read.to(gl.int32)], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _add_part(places, values, begins):
    """Adds to the sums of a part; the first tile of keys stores instead."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $12, 0; @p st.relaxed.gpu.global.v4.f32 [$4], {$8, $9, $10, $11}; "
        "@!p red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f,r,r,r,r", [places, values, begins.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=4,
    )  # fmt: skip


@gluon.jit
def query_sums(step, item, gradients, SHAPE: gl.constexpr):
    """A pointer to the sums of the step's queries, as the matrix units leave them: a thread adds 16 bytes at a time."""
    tile = query_tile(item, step, SHAPE)
    place = (item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP) * gradients.query_tiles + item.first_tile + tile
    return gradients.query_sums + place.to(gl.int64) * (SHAPE.BLOCK_M * SHAPE.HEAD_SIZE)


@gluon.jit
def add_columns(sums, START: gl.constexpr, values, step, item, gradients, MAY_END: gl.constexpr, SHAPE: gl.constexpr):
    """Adds to the sums of a tile of queries, from the column START on; the first tile of keys stores instead.

    The last one, if this MAY be it, reads back: products that begin with sums do not compile where two warpgroups share
    columns, and an addition in registers spills operands.
    """
    tile = query_tile(item, step, SHAPE)
    places = _places(sums, 0, START, values, SHAPE)
    if _turn(item, tile, SHAPE) == 0:
        _give(places, values, "st.relaxed.gpu.global.v4.f32")
    else:
        _give(places, values, "red.relaxed.gpu.global.add.v4.f32")
    if MAY_END:
        _round_columns(places, START, step, tile, item, gradients, SHAPE)


@gluon.jit
def _places(sums, ROW: gl.constexpr, START: gl.constexpr, values, SHAPE: gl.constexpr):
    """Addresses of the sums of a part, from a ROW and the column START on."""
    layout: gl.constexpr = values.type.layout
    rows = ROW + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    thread = (rows // 16 * 32 + rows % 8 * 4)[:, None] + (columns % 8 // 2)[None, :]
    offsets = thread * 4 + (columns // 8 * (SHAPE.BLOCK_M * 8))[None, :]
    return (sums + START * SHAPE.BLOCK_M + offsets).to(gl.int64, bitcast=True)


@gluon.jit
def _ends(tile, item, SHAPE: gl.constexpr):
    """No later keys are seen by the tile of queries."""
    return (item.keys <= SHAPE.BLOCK_N) | (item.first + SHAPE.BLOCK_N >= (tile + 1) * SHAPE.BLOCK_M)


@gluon.jit
def _store_rounded(
    values, ROW: gl.constexpr, START: gl.constexpr, step, tile, item, gradients, SHAPE: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = values.type.layout
    rows = ROW + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    columns = START + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    head = item.kv_head * SHAPE.GROUP + step % SHAPE.GROUP
    out = gradients.query + head * SHAPE.D_QUERY_STRIDES[1]
    out += (item.first_query + tile * SHAPE.BLOCK_M).to(gl.int64) * SHAPE.D_QUERY_STRIDES[0]
    cells = out + (rows * SHAPE.D_QUERY_STRIDES[0])[:, None] + columns[None, :]
    live = (rows < item.queries - tile * SHAPE.BLOCK_M)[:, None]
    gl.store(cells, (values * gradients.scale).to(gradients.query.dtype.element_ty), mask=live)


@gluon.jit
def _round_columns(places, START: gl.constexpr, step, tile, item, gradients, SHAPE: gl.constexpr):
    if _ends(tile, item, SHAPE):
        # Each thread reads what it has added to.
        sums = gl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l,l,l", [places],
            dtype=gl.float32, is_pure=False, pack=4,
        )  # fmt: skip
        _store_rounded(sums, 0, START, step, tile, item, gradients, SHAPE)


@gluon.jit
def _give(places, values, INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(
        INSTRUCTION + " [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [places, values], dtype=gl.int32, is_pure=False, pack=4,
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
def await_turn(ADDERS: gl.constexpr, needed=1):
    """Waits until `take_turns` says that this program, with ADDERS warpgroups, may add to the next tile of queries."""
    SYNC: gl.constexpr = _TURN_SYNC[ADDERS]
    _barrier(_TURN, needed, SYNC)


@gluon.jit
def pass_turn(ADDERS: gl.constexpr):
    """This warpgroup, one of ADDERS, has added to a tile of queries."""
    ARRIVE: gl.constexpr = _ADDED_ARRIVE[ADDERS]
    _barrier(_TURN + 1, 1, ARRIVE)


@gluon.jit
def take_turns(item, gradients, SHAPE: gl.constexpr):
    """One warp: waits until all earlier tiles of keys have added to a tile of queries.

    Without order until the first one has, which stores; but the last one, which rounds, still waits for all. If a
    launch of its own rounds, none does.
    Apart from the warpgroup that adds: in a loop that may diverge, its products would lose their uniform registers.
    """
    SYNC: gl.constexpr = _TURN_SYNC[SHAPE.ADDERS]
    for step in range((item.end - item.start) * SHAPE.GROUP):
        counter, tile = _turn_counter(step, item, gradients, SHAPE)
        turn = _turn(item, tile, SHAPE)
        if not SHAPE.IN_ORDER:
            first = gl.minimum(turn, 1)
            turn = first if SHAPE.RISES else gl.where(_ends(tile, item, SHAPE), turn, first)
        _counter(counter, turn, "again: ld.acquire.gpu.global.s32 v, [$1]; setp.lt.s32 p, v, $2; @p bra again;")
        _barrier(_TURN, 1, SYNC)


@gluon.jit
def pass_turns(item, gradients, SHAPE: gl.constexpr):
    """One warp: counts the tiles of keys that have added to a tile of queries; it alone waits until the sums are there.

    It falls at most one step behind the warpgroup that adds, which needs its word for a turn too.
    """
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
def _turn(item, tile, SHAPE: gl.constexpr):
    """The number of tiles of keys that add to this tile of queries before the program's."""
    turn = item.tile
    if SHAPE.LEFT:
        turn -= gl.maximum(item.lowest + tile * SHAPE.BLOCK_M, 0) // SHAPE.BLOCK_N
    return turn


@gluon.jit
def _turn_counter(step, item, gradients, SHAPE: gl.constexpr):
    tile = query_tile(item, step, SHAPE)
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
