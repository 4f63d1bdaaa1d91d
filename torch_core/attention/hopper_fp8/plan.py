"""The fp8 Hopper prefill kernel: which calls it serves, its tiles, and its launch; from shapes and dtypes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_core.attention.call import AttentionCall
from torch_core.attention.hopper.copies import array_matrix, copy_box, copy_descriptor, heads_together, is_served
from torch_core.attention.hopper_fp8.kernel import hopper_fp8_prefill_kernel
from torch_core.plan.operands import scale_pointer
from torch_core.plan.plan import ABSENT, Argument, LaunchPlan, Pointer, Scalar

__all__ = ["HopperFp8Tile", "hopper_fp8_launch", "hopper_fp8_tile"]

# Query rows of one product, and keys of one step.
_WARPGROUP_ROWS = 64
_BLOCK_N = 128
_ROWS = 2 * _WARPGROUP_ROWS
# Shorter queries leave most rows of a tile without work: the portable kernel puts heads side by side there.
_MIN_QUERY_LEN = 128


@dataclass(frozen=True, slots=True)
class HopperFp8Tile:
    """Tile of hopper_fp8_prefill_kernel: 128 query rows, 128 keys a step.

    Attributes:
        stages: tiles of keys, and of transposed values, in shared memory.
        raw_stages: tiles of values as they lie in the cache.
        query_stages: query tiles in shared memory.
        consumer_registers: registers of a thread that multiplies.
        transposer_registers: registers of a thread that transposes values.
        producer_registers: registers of a thread that loads.
        ping_pong: warpgroups multiply in turns.
        promote: the sums of each tile of values are added up in float32.
    """

    stages: int
    raw_stages: int
    query_stages: int
    consumer_registers: int
    transposer_registers: int
    producer_registers: int
    ping_pong: bool
    promote: bool


# Key/value heads worked on side by side: their keys and values stay in the L2 cache.
_KV_HEADS = 2
# By head size: what compiles without spills in the loops. Other tiles were not timed.
_TILES = {
    64: HopperFp8Tile(4, 2, 2, 208, 72, 24, True, True),
    128: HopperFp8Tile(2, 2, 2, 208, 72, 24, True, False),
}


def hopper_fp8_tile(head_size: int) -> HopperFp8Tile | None:
    """Returns the tile for a head size, None where there is none."""
    return _TILES.get(head_size)


def hopper_fp8_launch(
    call: AttentionCall, scalars: dict[str, Argument], *, min_query: int, tile: HopperFp8Tile | None = None
) -> LaunchPlan | None:
    """Plans hopper_fp8_prefill_kernel for a call's long queries and padding; None where other kernels serve them.

    The kernel takes e4m3 queries over a paged e4m3 cache and writes bfloat16 or float16; head sizes 64 and 128, a
    positive scale, causal and window masks, sinks, scales of queries, keys and values; strides and alignments that the
    copy engine can follow. Scales that are numbers are checked to be positive. Those that are arrays cannot be: they
    must be, as what a unit of a quantised array is worth always is.

    Args:
        call: the call.
        scalars: the by-value arguments that all attention kernels share.
        min_query: query rows from which on a sequence is served.
        tile: another tile than the table's, for measurements.
    """
    tile = tile or hopper_fp8_tile(call.key.shape[-1])
    scale = scalars["scale"]
    if tile is None or not _is_served(call) or not isinstance(scale, Scalar) or scale.value <= 0:
        return None
    items = (call.num_tokens // _ROWS + call.num_seqs + 1) * call.num_heads
    query, key, value = (array_matrix(call, name, _BLOCK_N) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or items >= 2**31:
        return None
    key_name, value_name = call.buffers
    box = copy_box(call, _BLOCK_N)
    head_size = call.key.shape[-1]
    arguments: dict[str, Argument] = {
        "query": copy_descriptor("query", query, (_WARPGROUP_ROWS, head_size), call.query.dtype),
        "key_cache": copy_descriptor(key_name, key, (box, head_size), call.key.dtype),
        "value_cache": copy_descriptor(value_name, value, (box, head_size), call.value.dtype),
        "block_tables": Pointer("block_tables"),
        "seq_lens": Pointer("seq_lens"),
        "query_start_loc": Pointer("query_start_loc"),
        "sinks": ABSENT if call.sinks is None else Pointer("sinks"),
        "q_scale": scale_pointer("q_scale", call.q_scale),
        "k_scale": scale_pointer("k_scale", call.k_scale),
        "v_scale": scale_pointer("v_scale", call.v_scale),
        "out": Pointer("out"),
        "lse": Pointer("lse") if call.with_lse else ABSENT,
        **{name: scalars[name] for name in hopper_fp8_prefill_kernel.arg_names if name in scalars},
    }
    constexprs: dict[str, Any] = {
        "NUM_HEADS": call.num_heads,
        "HEADS_TOGETHER": heads_together(call, _KV_HEADS),
        "GROUP": call.group,
        "HEAD_SIZE": head_size,
        "STAGES": tile.stages,
        "RAW_STAGES": tile.raw_stages,
        "QUERY_STAGES": tile.query_stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "TRANSPOSER_REGISTERS": tile.transposer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
        "PING_PONG": tile.ping_pong,
        "PROMOTE": tile.promote,
        "BLOCK_SIZE": call.block_size,
        "BLOCK_ROWS": key.block_rows,
        "BOX": box,
        "MIN_QUERY": min_query,
        "QUERY_STRIDE": query.head_stride,
        "KEY_STRIDE": key.head_stride,
        "VALUE_STRIDE": value.head_stride,
        "VALUE_ROW": value.value_row,
        "OUT_STRIDES": call.out.element_strides[:2],
    }
    names = hopper_fp8_prefill_kernel.arg_names
    return LaunchPlan(
        kernel=hopper_fp8_prefill_kernel,
        grid=(min(items, call.limits.num_sms),),
        arguments=tuple((name, arguments[name]) for name in names if name in arguments),
        constexprs=tuple((name, constexprs[name]) for name in names if name in constexprs),
        writes=("out", "lse") if call.with_lse else ("out",),
        num_warps=4,
        # Not hot: with heads of 128, a few bytes of state outside the loops are spilled.
    )


def _is_served(call: AttentionCall) -> bool:
    return (
        is_served(call)
        and call.paged
        and call.query.dtype == call.key.dtype == "float8_e4m3fn"
        and call.out.dtype in ("bfloat16", "float16")
        and call.max_query_len >= _MIN_QUERY_LEN
    )
