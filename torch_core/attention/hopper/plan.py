"""The Hopper prefill kernel: which calls it serves, its tiles, and its launch; from shapes, dtypes and limits alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.attention.call import AttentionCall
from torch_core.attention.hopper.copies import (
    Matrix,
    array_matrix,
    copy_box,
    copy_descriptor,
    heads_together,
    is_served,
)
from torch_core.attention.hopper.kernel import hopper_prefill_kernel
from torch_core.plan.plan import ABSENT, Argument, ArraySpec, Descriptor, LaunchPlan, Pointer

__all__ = ["HopperTile", "hopper_launch", "hopper_pack", "hopper_tile"]

# Query rows of one product, and so of a warpgroup.
_WARPGROUP_ROWS = 64
# From this length on, a tile holds tokens of one head. Shorter queries would leave most of its rows without work.
_LONG_QUERY_LEN = 128
# Heads side by side in a tile of short queries: a warpgroup then still holds 4 tokens.
_MAX_PACK = 16
# What short queries must bring, see `hopper_pack`. Above these bounds Hopper took 0.5 to 0.9 of the portable kernel's
# time in every row of `jattn bench prefill --chunks` on an H200; the bounds themselves are worked out, not measured.
_MIN_PACKED_ROWS = 65
_MIN_PACKED_KEYS = 512
_MAX_PACKED_SEQS = 256
_PACKED_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Tile of hopper_prefill_kernel.

    Attributes:
        warpgroups: warpgroups that multiply, two or three.
        block_n: keys of one step.
        stages: tiles of keys, and of values, in shared memory: two or four.
        query_stages: query tiles in shared memory.
        consumer_registers: registers of a thread that multiplies.
        producer_registers: registers of a thread that loads.
        ping_pong: warpgroups multiply in turns.
        overlap: a warpgroup's softmax runs beside its own products with values; it then has two tiles of weights.
        kv_heads: key/value heads that are worked on side by side; their keys and values stay in the L2 cache. The
            plan takes the largest divisor of all of them that is no larger.
    """

    warpgroups: int
    block_n: int
    stages: int
    query_stages: int
    consumer_registers: int
    producer_registers: int
    ping_pong: bool = True
    overlap: bool = True
    kv_heads: int = 2

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.warpgroups * _WARPGROUP_ROWS


# Measured on an H200 (`jattn bench tune --hopper-tiles`); by head size, the tiles from a query length on. Three
# warpgroups have more softmax to do while one multiplies, and read keys and values a third less often; on short queries
# the taller tile has more rows without work than it gains. All tiles of a head size take keys in the same steps.
_TILES: dict[int, tuple[tuple[int, HopperTile], ...]] = {
    64: (
        (0, HopperTile(2, 128, 4, 2, 232, 48, overlap=False)),
        (2048, HopperTile(3, 128, 4, 2, 160, 32, overlap=False)),
    ),
    128: (
        (0, HopperTile(2, 64, 4, 2, 232, 48)),
        (2048, HopperTile(3, 64, 4, 2, 160, 32)),
    ),
    256: ((0, HopperTile(2, 64, 2, 1, 232, 48, ping_pong=False, kv_heads=1)),),
}


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
    tiles = [tile for length, tile in _TILES.get(head_size, ()) if length <= max_query_len]
    return tiles[-1] if tiles else None


def hopper_pack(*, group: int, max_query_len: int, num_seqs: int, keys: int) -> int:
    """Returns the query heads that lie side by side in a tile; 0 where the portable kernel serves the call better.

    Long queries fill tiles head by head. Short ones do with all heads of a group side by side, if the group is a power
    of two: like this, both kernels read the keys of a tile once, and have the same tiles. On an H200 the Hopper kernel
    takes about 15 ns for a key of a tile (two products of 128 rows and 128 columns at 550 TFLOP/s, or 0.5 KiB at the
    speed of the memory: about equal), the portable one 21 to 25. Neither splits keys, so few tiles are no reason for
    the portable kernel. What is: a start that is some microseconds slower (barriers, descriptors, registers moved
    between warps), which 512 keys pay back; and the search for a tile's sequence, about a microsecond for every 32
    sequences. The split kernel, with keys in chunks, serves up to 64 rows before this is asked. Like its chunks, the
    choice follows from padded shapes, never from lengths.

    Args:
        group: query heads of one key/value head.
        max_query_len: an upper bound on the query length.
        num_seqs: sequences, padding included.
        keys: keys that a sequence may have: the width of the block table, or the mean of dense keys.

    Example:
        >>> [hopper_pack(group=4, max_query_len=n, num_seqs=8, keys=8192) for n in (16, 64, 512)]
        [0, 4, 1]
    """
    if max_query_len >= _LONG_QUERY_LEN:
        return 1
    pack = min(group, _MAX_PACK)
    worth = max_query_len * pack >= _MIN_PACKED_ROWS and keys >= _MIN_PACKED_KEYS and num_seqs <= _MAX_PACKED_SEQS
    return pack if pack > 1 and group & (group - 1) == 0 and worth else 0


def hopper_launch(
    call: AttentionCall,
    scalars: dict[str, Argument],
    *,
    min_query: int,
    tile: HopperTile | None = None,
    pack: int | None = None,
) -> LaunchPlan | None:
    """Plans hopper_prefill_kernel for a call's rows and padding; None where the portable kernel serves them.

    The Hopper kernel takes bfloat16 and float16 with head sizes 64, 128 and 256, a positive scale, causal and window
    masks, sinks, and scales that are numbers; strides and alignments that the copy engine can follow.

    Args:
        call: the call.
        scalars: the by-value arguments that all attention kernels share.
        min_query: query rows from which on a sequence is served.
        tile: another tile than the table's, for measurements.
        pack: another number of heads side by side than `hopper_pack` says, for measurements; a power of two up to 16
            that divides the group.
    """
    tile = tile or hopper_tile(head_size=call.key.shape[-1], max_query_len=call.max_query_len)
    if pack is None:
        keys = call.table_tokens if call.paged else call.key.shape[0] // call.num_seqs
        pack = hopper_pack(group=call.group, max_query_len=call.max_query_len, num_seqs=call.num_seqs, keys=keys)
    if tile is None or pack == 0 or not _is_served(call):
        return None
    items = (call.num_tokens // (tile.rows // pack) + call.num_seqs + 1) * (call.num_heads // pack)
    query, key, value = (array_matrix(call, name, tile.block_n) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or items >= 2**31 or not _is_packed(query, pack):
        return None
    key_name, value_name = call.buffers
    box = copy_box(call, tile.block_n)
    head_size = call.key.shape[-1]
    arguments: dict[str, Argument] = {
        "query": _query_descriptor(call, query, pack),
        "key_cache": copy_descriptor(key_name, key, (box, head_size), call.key.dtype),
        "value_cache": copy_descriptor(value_name, value, (box, head_size), call.value.dtype),
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
        "PACK": pack,
        "HEAD_SIZE": head_size,
        "WARPGROUPS": tile.warpgroups,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "QUERY_STAGES": tile.query_stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
        "PING_PONG": tile.ping_pong,
        "OVERLAP": tile.overlap,
        "HEADS_TOGETHER": heads_together(call, tile.kv_heads if pack == 1 else call.num_kv_heads) // pack,
        "BLOCK_SIZE": call.block_size,
        "BLOCK_ROWS": key.block_rows,
        "BOX": box,
        "PAGED": call.paged,
        "MIN_QUERY": min_query,
        "QUERY_STRIDE": query.head_stride if pack == 1 else 0,
        "KEY_STRIDE": key.head_stride,
        "VALUE_STRIDE": value.head_stride,
        "VALUE_ROW": value.value_row,
        "OUT_STRIDES": call.out.element_strides[:2],
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
    return (
        is_served(call)
        and call.query.dtype in ("bfloat16", "float16")
        and call.key.dtype == call.out.dtype == call.query.dtype
        and not any(isinstance(scale, ArraySpec) for scale in (call.q_scale, call.k_scale, call.v_scale))
    )


def _is_packed(query: Matrix, pack: int) -> bool:
    # The copy engine wants the stride of each axis of the query to be a multiple of the next one's.
    return pack == 1 or (query.head_stride > 0 and query.stride % query.head_stride == 0)


def _query_descriptor(call: AttentionCall, query: Matrix, pack: int) -> Descriptor:
    head_size = call.key.shape[-1]
    if pack == 1:
        return copy_descriptor("query", query, (_WARPGROUP_ROWS, head_size), call.query.dtype)
    strides = (query.stride, query.head_stride, 1)
    return Descriptor("query", call.query.shape, strides, (_WARPGROUP_ROWS // pack, pack, head_size), _PACKED_LAYOUT)
