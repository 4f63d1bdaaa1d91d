"""The Hopper prefill kernel: which calls it serves, its tiles, and its launch; from shapes, dtypes and limits alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.kernels.hopper_prefill import hopper_prefill_kernel
from torch_core.plans.attention_call import AttentionCall
from torch_core.plans.plan import ABSENT, Argument, ArraySpec, Descriptor, LaunchPlan, Pointer
from torch_core.specs import DTYPE_BYTES

__all__ = ["HopperTile", "Matrix", "array_matrix", "copy_box", "hopper_launch", "hopper_tile", "is_copied"]

_ARCH = 90
# Query rows of one product, and so of a warpgroup.
_WARPGROUP_ROWS = 64
# The copy engine's swizzle repeats every 8 rows, and one copy moves at most 256.
_MIN_BOX = 8
_MAX_BOX = 256
# Shorter queries leave most rows of a tile without work: the portable kernel puts heads side by side there.
_MIN_QUERY_LEN = 128
# Coordinates of the copy engine are 32-bit.
_MAX_ROWS = 2**31 - 2 * _MAX_BOX
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Tile of hopper_prefill_kernel.

    Attributes:
        warpgroups: warpgroups that multiply, two or three.
        block_n: keys of one step.
        stages: tiles of keys, and of values, in shared memory.
        query_stages: query tiles in shared memory.
        consumer_registers: registers of a thread that multiplies.
        producer_registers: registers of a thread that loads.
        ping_pong: warpgroups multiply in turns.
        overlap: a warpgroup's softmax ends before it waits for its products with values.
        skip_rescale: a warp leaves its sums as they are while the maxima of its rows stay; head size 64 alone.
    """

    warpgroups: int
    block_n: int
    stages: int
    query_stages: int
    consumer_registers: int
    producer_registers: int
    ping_pong: bool
    overlap: bool
    skip_rescale: bool = False

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * _WARPGROUP_ROWS


# Measured on an H200; by head size.
_TILES = {
    64: HopperTile(2, 128, 4, 2, 232, 40, True, False),
    128: HopperTile(2, 128, 2, 2, 232, 40, True, False),
    256: HopperTile(2, 64, 2, 1, 232, 40, True, True),
}
# Heads of 64 leave registers for a third warpgroup: more softmax to do while one multiplies. On short queries the
# taller tile has more rows without work than it gains.
_TALL_TILES = {64: HopperTile(3, 128, 2, 2, 160, 24, True, False, skip_rescale=True)}
_TALL_QUERY_LEN = 2048


@dataclass(frozen=True, slots=True)
class Matrix:
    """An array as rows of the copy engine: token by token, heads side by side.

    Attributes:
        shape: rows and columns.
        stride: elements from one row to the next.
        block_rows: rows from one block of a paged cache to the next; 0 for other arrays.
        head_stride: columns from one head to the next.
        value_row: row of the first value in a combined cache.
    """

    shape: tuple[int, int]
    stride: int
    block_rows: int
    head_stride: int
    value_row: int = 0


def hopper_tile(*, head_size: int, max_query_len: int) -> HopperTile | None:
    """Returns the tile for a head size, None where there is none.

    Every tile of a head size gives the same bits: a warpgroup takes the same rows through the same tiles of keys.

    Args:
        head_size: elements of a head.
        max_query_len: an upper bound on the query length.

    Example:
        >>> hopper_tile(head_size=64, max_query_len=512).rows, hopper_tile(head_size=64, max_query_len=8192).rows
        (128, 192)
    """
    if max_query_len >= _TALL_QUERY_LEN and head_size in _TALL_TILES:
        return _TALL_TILES[head_size]
    return _TILES.get(head_size)


def hopper_launch(
    call: AttentionCall, scalars: dict[str, Argument], *, min_query: int, tile: HopperTile | None = None
) -> LaunchPlan | None:
    """Plans hopper_prefill_kernel for a call's long queries and padding; None where the portable kernel serves them.

    The Hopper kernel takes bfloat16 and float16 with head sizes 64, 128 and 256, a positive scale, causal and window
    masks, sinks, and scales that are numbers; strides and alignments that the copy engine can follow.

    Args:
        call: the call.
        scalars: the by-value arguments that all attention kernels share.
        min_query: query rows from which on a sequence is served.
        tile: another tile than the table's, for measurements.
    """
    tile = tile or hopper_tile(head_size=call.key.shape[-1], max_query_len=call.max_query_len)
    if tile is None or not _is_served(call):
        return None
    items = (call.num_tokens // tile.rows + call.num_seqs + 1) * call.num_heads
    query, key, value = (array_matrix(call, name, tile.block_n) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or items >= 2**31:
        return None
    key_name, value_name = call.buffers
    box = copy_box(call, tile.block_n)
    head_size = call.key.shape[-1]
    arguments: dict[str, Argument] = {
        "query": _descriptor("query", query, (_WARPGROUP_ROWS, head_size)),
        "key_cache": _descriptor(key_name, key, (box, head_size)),
        "value_cache": _descriptor(value_name, value, (box, head_size)),
        "block_tables": ABSENT if call.block_tables is None else Pointer("block_tables"),
        "seq_lens": ABSENT if call.seq_lens is None else Pointer("seq_lens"),
        "query_start_loc": Pointer("query_start_loc"),
        "key_start_loc": ABSENT if call.key_start_loc is None else Pointer("key_start_loc"),
        "sinks": ABSENT if call.sinks is None else Pointer("sinks"),
        "out": Pointer("out"),
        "lse": Pointer("lse") if call.with_lse else ABSENT,
        **{name: scalars[name] for name in hopper_prefill_kernel.arg_names if name in scalars},
    }
    constexprs: dict[str, Any] = {
        "NUM_HEADS": call.num_heads,
        "GROUP": call.group,
        "HEAD_SIZE": head_size,
        "WARPGROUPS": tile.warpgroups,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "QUERY_STAGES": tile.query_stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
        "PING_PONG": tile.ping_pong,
        "OVERLAP": tile.overlap,
        "SKIP_RESCALE": tile.skip_rescale,
        "BLOCK_SIZE": call.block_size,
        "BLOCK_ROWS": key.block_rows,
        "BOX": box,
        "PAGED": call.paged,
        "MIN_QUERY": min_query,
        "QUERY_STRIDE": query.head_stride,
        "KEY_STRIDE": key.head_stride,
        "VALUE_STRIDE": value.head_stride,
        "VALUE_ROW": value.value_row,
        "OUT_TOKEN_STRIDE": call.out.element_strides[0],
        "OUT_HEAD_STRIDE": call.out.element_strides[1],
    }
    return LaunchPlan(
        kernel=hopper_prefill_kernel,
        grid=(min(items, call.limits.num_sms),),
        arguments=tuple((name, arguments[name]) for name in hopper_prefill_kernel.arg_names if name in arguments),
        constexprs=tuple((name, constexprs[name]) for name in hopper_prefill_kernel.arg_names if name in constexprs),
        writes=("out", "lse") if call.with_lse else ("out",),
        num_warps=4,
        # Not hot: a few bytes of state outside the loops are spilled.
    )


def _is_served(call: AttentionCall) -> bool:
    scales = (call.q_scale, call.k_scale, call.v_scale, call.out_scale)
    return (
        call.limits.arch == _ARCH
        and call.plain
        and call.query.dtype in ("bfloat16", "float16")
        and call.key.dtype == call.out.dtype == call.query.dtype
        and call.value.shape[-1] == call.key.shape[-1]
        and call.seq_causal is None
        and call.spec.attention_chunk is None
        and not any(isinstance(scale, ArraySpec) for scale in scales)
        and call.spec.scale > 0
        and call.max_query_len >= _MIN_QUERY_LEN
        and call.out.aligned
        and all(is_copied(stride, call.out.dtype) for stride in call.out.element_strides[:2])
    )


def copy_box(call: AttentionCall, block_n: int) -> int:
    """Returns the keys that one copy into a tile of `block_n` keys moves."""
    return min(call.block_size, block_n) if call.paged else block_n


def is_copied(stride: int, dtype: str) -> bool:
    """Whether the copy engine, and stores of 16 bytes, can follow a stride."""
    return stride * DTYPE_BYTES[dtype] % 16 == 0


def array_matrix(call: AttentionCall, name: str, block_n: int) -> Matrix | None:
    """Returns a call's "query", "key" or "value" as a matrix that the copy engine can follow; None if there is none."""
    spec = {"query": call.query, "key": call.key, "value": call.value}[name]
    *outer, head_stride, _ = spec.element_strides
    heads, head_size = spec.shape[-2:]
    stride = outer[-1]
    width = (heads - 1) * head_stride + head_size
    if not spec.aligned or 0 in spec.shape or not 0 < width <= max(stride, width if spec.shape[0] == 1 else 0):
        return None
    if not is_copied(stride, spec.dtype) or not is_copied(head_stride, spec.dtype):
        return None
    if name == "query" or not call.paged:
        return Matrix((spec.shape[0], width), stride, 0, head_stride)
    block_stride = outer[0]
    box = copy_box(call, block_n)
    if box < _MIN_BOX or box & (box - 1) or (call.block_size % box or block_n % box):
        return None
    offset = call.value_offset if name == "value" else 0
    last_row = (spec.shape[0] - 1) * block_stride // stride + call.block_size
    rows = last_row + call.value_offset // stride
    if block_stride % stride or block_stride <= 0 or offset % stride or rows > _MAX_ROWS:
        return None
    return Matrix((rows, width), stride, block_stride // stride, head_stride, offset // stride)


def _descriptor(buffer: str, matrix: Matrix, box: tuple[int, int]) -> Descriptor:
    return Descriptor(buffer, matrix.shape, (matrix.stride, 1), box, _LAYOUT)
