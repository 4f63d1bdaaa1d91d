"""8-bit latents in the Hopper kernel: threads gather e4m3 or packed rows, and unpack them to bfloat16.

A code is the upper part of a bfloat16 number whose exponent is 120 too small. Shifts and masks convert two at a time;
Hopper's own conversions have a quarter of that speed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.device.gluon_names import async_gather, reinterpret, thread_barrier
from torch_core.device.hopper_latents import BLOCK_N, HALF, PACKED_BYTES, ROPE, ROPE_OFFSET, SCALE_OFFSET, places_of
from torch_core.latent.kernels.mla_hopper.loads import load_query, slot_of
from torch_core.latent.kernels.mla_hopper.weighing import store_weighed, weigh_tile, zero_sums

# Eight threads copy 128 bytes of a row side by side.
_GATHERED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_BYTES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
# A thread unpacks eight codes of a row to 16 bytes.
_UNPACKED = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
_UNPACKED_ROPE = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
# Elements of a group, which share a scale, and rows that are unpacked together.
_GROUP = gl.constexpr(128)
_PART = gl.constexpr(32)


def _unpack_assembly(scaled: bool) -> str:
    # Operands: two words of two bfloat16 numbers each, a word of four codes, and the two parts of their scale, each
    # twice. The product with the smaller part is exact to as many bits as the sum that rounds. Without scales, a NaN,
    # which looks like 480, must not stay a number (the scale of a packed NaN is NaN): 1.07 * 2^119 times 480 is
    # infinite, times 448, the largest number, it is not, and infinity times 0 is NaN.
    scaling = "mul.rn.bf16x2 low, word, $4; fma.rn.bf16x2 {0}, word, $3, low; "
    checking = "mul.rn.bf16x2 low, word, huge; fma.rn.bf16x2 {0}, low, zero, word; "

    def pair(result: str, bytes_: str) -> str:
        return (
            f"prmt.b32 word, $2, 0, {bytes_}; shr.u32 low, word, 4; and.b32 word, word, 0x80008000; "
            "and.b32 low, low, 0x07F007F0; or.b32 word, word, low; mul.rn.bf16x2 word, word, unit; "
            + (scaling if scaled else checking).format(result)
        )

    # 0x7B80 is 2^120 as bfloat16, 0x7B09 the limit's factor.
    numbers = "mov.b32 unit, 0x7B807B80; mov.b32 huge, 0x7B097B09; mov.b32 zero, 0; "
    return f"{{ .reg .b32 word, low, unit, huge, zero; {numbers}{pair('$0', '0x1404')}{pair('$1', '0x3424')}}}"


_UNPACK = gl.constexpr(_unpack_assembly(scaled=False))
_UNPACK_SCALED = gl.constexpr(_unpack_assembly(scaled=True))


@gluon.jit
def weigh_codes(OWN: gl.constexpr, work, source, room, results, SHAPE: gl.constexpr):
    """One warpgroup: unpacks the half OWN of latents, adds up weighted ones, and stores the sums."""
    if OWN == 0:
        load_query(work, source, room, SHAPE)
    rows = places_of(work, source.table, 1, _GATHERED, SHAPE)
    if work.tiles > 0:
        _gather(OWN, 0, places_of(work, source.table, 0, _GATHERED, SHAPE), source, room)
        _unpack(OWN, 0, room)
    if OWN == 1:
        # Parts of the query lie where the second tile will.
        mbarrier.wait(room.query_read, 0)
    if work.tiles > 1:
        _gather(OWN, 1, rows, source, room)
    acc = zero_sums()
    for step in range(work.tiles):
        rows = places_of(work, source.table, step + 2, _GATHERED, SHAPE)
        # The third warpgroup computes the weights of this tile meanwhile.
        if step + 1 < work.tiles:
            _unpack(OWN, step + 1, room)
        if step + 2 < work.tiles:
            _gather(OWN, step + 2, rows, source, room)
        acc = weigh_tile(OWN, step, acc, room)
    store_weighed(OWN, acc, work, room, results, SHAPE)


@gluon.jit
def _gather(OWN: gl.constexpr, step, rows, source, room):
    """Starts the copies of the half OWN of a tile, and with the second half of the rotary keys."""
    PACKED: gl.constexpr = room.scales is not None
    codes = room.codes.index(OWN)
    starts = source.latent_cache + rows.to(gl.int64) * (PACKED_BYTES if PACKED else 2 * HALF + ROPE)
    inside = (rows >= 0)[:, None]
    columns = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, _GATHERED))
    for i in gl.static_range(HALF // _GROUP):
        pointers = starts[:, None] + (OWN * HALF + i * _GROUP + columns)[None, :]
        async_gather(codes.slice(i * _GROUP, _GROUP, 1), pointers, mask=inside)
    if PACKED:
        scales = reinterpret(room.scales.index(OWN), gl.uint8, BLOCK_N, 16, _PLAIN)
        columns = gl.arange(0, 16, layout=gl.SliceLayout(0, _GATHERED))
        pointers = starts[:, None] + (SCALE_OFFSET + columns)[None, :]
        async_gather(scales, pointers, mask=inside)
    if OWN == 1:
        if PACKED:
            rope = reinterpret(room.rope.index(step % room.rope.shape[0]), gl.uint8, BLOCK_N, 2 * ROPE, _BYTES)
        else:
            rope = room.rope_codes
        columns = gl.arange(0, rope.shape[1], layout=gl.SliceLayout(0, _GATHERED))
        pointers = starts[:, None] + ((ROPE_OFFSET if PACKED else 2 * HALF) + columns)[None, :]
        async_gather(rope, pointers, mask=inside)
    async_copy.mbarrier_arrive(room.raw.index(OWN), increment_count=False)


@gluon.jit
def _unpack(OWN: gl.constexpr, step, room):
    """Unpacks the half OWN of a tile into its slot, once its copies have come."""
    slot, _ = slot_of(2 * step + OWN, room)
    mbarrier.wait(room.raw.index(OWN), step & 1)
    words = reinterpret(room.codes.index(OWN), gl.int32, BLOCK_N, HALF // 4, _WORDS)
    target = reinterpret(room.latents.tiles.index(slot), gl.int32, BLOCK_N, HALF // 2, _WORDS)
    for i in gl.static_range(HALF // _GROUP):
        for first in gl.static_range(0, BLOCK_N, _PART):
            codes = words.slice(first, _PART).slice(i * (_GROUP // 4), _GROUP // 4, 1).load(_UNPACKED)
            if room.scales is not None:
                column = room.scales.index(OWN).slice(OWN * (HALF // _GROUP) + i, 1, 1)
                unpacked = _scaled(codes, column.slice(first, _PART).load(_UNPACKED))
            else:
                unpacked = _plain(codes)
            target.slice(first, _PART).slice(i * (_GROUP // 2), _GROUP // 2, 1).store(unpacked)
    if (OWN == 1) & (room.scales is None):
        words = reinterpret(room.rope_codes, gl.int32, BLOCK_N, ROPE // 4, _PLAIN)
        rope = reinterpret(room.rope.index(step % room.rope.shape[0]), gl.int32, BLOCK_N, ROPE // 2, _WORDS)
        rope.store(_plain(words.load(_UNPACKED_ROPE)))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(room.latents.full.index(slot), count=1)


@gluon.jit
def _plain(codes):
    """Words of two bfloat16 numbers each from words of four codes."""
    left, right = gl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(left, right).reshape([codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def _scaled(codes, scale):
    """The same, times the scale of the row."""
    upper = scale.to(gl.int32, bitcast=True) & -65536
    rest = (scale - upper.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    left, right = gl.inline_asm_elementwise(
        _UNPACK_SCALED, "=&r,=&r,r,r,r", [codes, _twice(upper), _twice(rest)], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(left, right).reshape([codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def _twice(bits):
    """Words that hold the upper half of a float32 number, a bfloat16 number, twice."""
    return (bits & -65536) | ((bits >> 16) & 0xFFFF)
