"""The warps of the fp8 Hopper prefill kernel that transpose values: the matrix units want their keys adjacent."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_core.device.gluon_names import reinterpret
from torch_core.device.hopper_items import words_of
from torch_core.device.hopper_turns import ring_slot

# Bytes of four words a, b, c, d (four keys, the same four columns) to four words of one column each.
_TRANSPOSE = gl.constexpr(
    "{ .reg .b32 low_ab, high_ab, low_cd, high_cd; "
    "prmt.b32 low_ab, $4, $5, 0x5140; prmt.b32 high_ab, $4, $5, 0x7362; "
    "prmt.b32 low_cd, $6, $7, 0x5140; prmt.b32 high_cd, $6, $7, 0x7362; "
    "prmt.b32 $0, low_ab, low_cd, 0x5410; prmt.b32 $1, low_ab, low_cd, 0x7632; "
    "prmt.b32 $2, high_ab, high_cd, 0x5410; prmt.b32 $3, high_ab, high_cd, 0x7632; }"
)

# Where the words of a tile are, as one axis: bits 3, 4, 1, 2, 0, 5, 6 of the key are its bits 0 to 6, and above them is
# the number of the word, column / 4, whose bit 2 comes last: pieces of 2,048 words have the same bits with 64 columns
# and with 128. In a transposed tile bits 0 and 1 are those of the column instead.
_K0, _K1, _K2, _K3, _K4, _K5, _K6 = 16, 4, 8, 1, 2, 32, 64
_W0, _W1, _W3, _W4, _W2 = 128, 256, 512, 1024, 2048
_C0, _C1 = 1, 2
_PIECE = gl.constexpr(2048)


def _bases(*numbers: int) -> list[list[int]]:
    return [[number] for number in numbers]


# Tiles as the copy engine leaves them: rows of 128 bytes, or 64, whose pieces of 16 bytes are swizzled by the row.
_WIDE_RAW = gl.constexpr(
    gl.SharedLinearLayout(
        _bases(_W0, _W1, _W2, _W3, _W4, _K0 | _W2, _K1 | _W3, _K2 | _W4, _K3, _K4, _K5, _K6), alignment=1024
    )
)
_NARROW_RAW = gl.constexpr(
    gl.SharedLinearLayout(_bases(_W0, _W1, _W3, _W4, _K0, _K1 | _W3, _K2 | _W4, _K3, _K4, _K5, _K6), alignment=1024)
)
# Tiles as the matrix units want them: rows of 128 keys, swizzled in the same way. Of 64 columns, a row's number has the
# bits 0, 3, 5, 1, 2, 4 of its column, so that the columns of the product that a thread has, 8 * i + 2 * t + (0, 1), are
# eights of neighbours.
_KEYS = (_K1, _K2, _K0, _K5, _K6)
_WIDE_TURNED = gl.constexpr(
    gl.SharedLinearLayout(_bases(*_KEYS, _C0 | _K0, _W1 | _K5, _W3 | _K6, _C1, _W0, _W2, _W4), alignment=1024)
)
_NARROW_TURNED = gl.constexpr(
    gl.SharedLinearLayout(_bases(*_KEYS, _C0 | _K0, _W1 | _K5, _W4 | _K6, _C1, _W0, _W3), alignment=1024)
)
# A piece's words in two warps or four, and a whole wide tile's: loads of two words, for threads with many registers.
_LANES = _bases(_K0, _W1, _W0 | _K6, _W3, _W4)
_WORDS_OF_TWO = gl.constexpr(
    gl.DistributedLinearLayout(_bases(_K1, _K2, _K3, _K4, _K6), _LANES, _bases(_K5), [], [_PIECE.value])
)
_WIDE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        _bases(_W0, _K1, _K2, _K3, _K4), _bases(_K0, _W1, _W3, _W4, _W2), _bases(_K5, _K6), [], [4096]
    )
)
_WORDS_OF_FOUR = gl.constexpr(
    gl.DistributedLinearLayout(_bases(_K1, _K2, _K3, _K4), _LANES, _bases(_K5, _K6), [], [_PIECE.value])
)


def _out_layout(columns: int) -> gl.constexpr:
    further = [[0, 1 << bit] for bit in (4, 6, 7) if 1 << bit < columns]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *further]
    lanes = [[0, 8], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns]))


# Where a thread has its sums, by the columns of a tile.
_OUT_64, _OUT_128, _OUT_256 = (_out_layout(columns) for columns in (64, 128, 256))


@gluon.jit
def transpose_values(call, rings, SHAPE: gl.constexpr):
    """Two warps or four: tiles [128 keys, head] to tiles [head, 128 keys], zero where no key of the sequence is.

    The weight of such a row is 0, but 0 * NaN of unwritten memory is NaN.

    A tile's keys come in the order in which a thread of the matrix units holds their weights: bit 0 of a key's number
    is bit 4 of its place, bits 1 and 2 are bits 2 and 3, bits 3 and 4 are bits 0 and 1. `fp8_softmax_step` has the
    same order. Its columns come in the order of `in_columns`.
    """
    HEAD_SIZE: gl.constexpr = SHAPE.HEAD_SIZE
    raw = rings.raw
    values = rings.value
    INFO_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    # A tile of 256 columns is two of 128, one behind the other, to the copy engine and to the matrix units.
    WIDTH: gl.constexpr = 64 if HEAD_SIZE == 64 else 128
    PARTS: gl.constexpr = HEAD_SIZE // WIDTH
    raw_layout: gl.constexpr = _WIDE_RAW if WIDTH == 128 else _NARROW_RAW
    v_layout: gl.constexpr = _WIDE_TURNED if WIDTH == 128 else _NARROW_TURNED
    raw_words = reinterpret(raw.tiles, gl.int32, raw.full.shape[0] * PARTS, 32 * WIDTH, raw_layout)
    v_words = reinterpret(values.tiles, gl.int32, values.full.shape[0] * PARTS, 32 * WIDTH, v_layout)
    programs = gl.num_programs(0)
    step = 0
    for turn in range((call.num_items + programs - 1) // programs):
        place = gl.program_id(0)
        place = gl.where(turn % 2 == 0, place, programs - 1 - place)
        if turn * programs + place < call.num_items:
            raw_stage, raw_phase = ring_slot(raw, step)
            mbarrier.wait(raw.full.index(raw_stage), raw_phase)
            _, _, tiles, _, _, _, _, _ = words_of(rings.raw_bounds.index(raw_stage).load(INFO_LAYOUT))
            for _ in range(tiles):
                raw_stage, raw_phase = ring_slot(raw, step)
                stage, phase = ring_slot(values, step)
                mbarrier.wait(raw.full.index(raw_stage), raw_phase)
                first, end, _, _, _, _, _, _ = words_of(rings.raw_bounds.index(raw_stage).load(INFO_LAYOUT))
                mbarrier.wait(values.empty.index(stage), phase ^ 1)
                for i in range(PARTS):
                    words = raw_words.index(raw_stage * PARTS + i)
                    turned = v_words.index(stage * PARTS + i)
                    if HEAD_SIZE == 128 and gl.num_warps() == 4:
                        _transpose(words, turned, first, end, _WIDE_WORDS)
                    else:
                        _transpose_in_pieces(words, turned, first, end, WIDTH)
                fence_async_shared()
                mbarrier.arrive(values.full.index(stage), count=1)
                mbarrier.arrive(raw.empty.index(raw_stage), count=1)
                step += 1


@gluon.jit
def in_columns(acc):
    """The sums of 64 rows with transposed tiles, in the order of the head's elements; moves nothing.

    A thread has eights of neighbours then, and stores each at once, without passing it through shared memory.
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = _OUT_64 if COLUMNS == 64 else (_OUT_128 if COLUMNS == 128 else _OUT_256)
    acc = acc.reshape([64, COLUMNS // 64, 2, 4, 2, 2, 2]).permute((0, 1, 4, 2, 5, 3, 6)).reshape([64, COLUMNS])
    return gl.convert_layout(acc, layout, assert_trivial=True)


@gluon.jit
def _transpose_in_pieces(words, turned, first, end, WIDTH: gl.constexpr):
    layout: gl.constexpr = _WORDS_OF_TWO if gl.num_warps() == 2 else _WORDS_OF_FOUR
    for i in gl.static_range(WIDTH // 64):
        _transpose(words.slice(i * _PIECE, _PIECE), turned.slice(i * _PIECE, _PIECE), first, end, layout)


@gluon.jit
def _transpose(raw_words, tile_words, first, end, LAYOUT: gl.constexpr):
    """Words of four columns at a time; lanes lie so that neither the loads nor the stores meet in a bank."""
    words = raw_words.load(LAYOUT)
    if (first > 0) | (end < 128):
        place = gl.arange(0, words.shape[0], layout=LAYOUT)
        keys = (place >> 4 & 1) | (place >> 1 & 6) | (place << 3 & 24) | (place & 96)
        tile_words.store(_transposed(gl.where((keys >= first) & (keys < end), words, 0)))
    else:
        # Apart, or every tile would go through the selection.
        tile_words.store(_transposed(words))


@gluon.jit
def _transposed(words):
    SIZE: gl.constexpr = words.shape[0]
    low, high = gl.split(words.reshape([SIZE // 4, 2, 2]))
    a, c = gl.split(low)
    b, d = gl.split(high)
    w, x, y, z = gl.inline_asm_elementwise(
        _TRANSPOSE, "=&r,=&r,=&r,=&r,r,r,r,r", [a, b, c, d],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(w, y), gl.join(x, z)).reshape([SIZE])
