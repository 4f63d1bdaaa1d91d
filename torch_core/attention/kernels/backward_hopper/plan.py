"""The launches of the Hopper backward pass, where it serves a call, and their tiles; from shapes and limits alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from torch_core.attention.backward_call import DenseBackwardCall
from torch_core.attention.copies import array_matrix, copy_descriptor, dense_matrix, is_copied
from torch_core.attention.kernels.backward_hopper.kernel import hopper_backward_kernel
from torch_core.attention.kernels.backward_hopper.rows import finish_backward_kernel, prepare_backward_kernel
from torch_core.attention.operands import count, make_launch, operation
from torch_core.attention.partials import sum_parts_launch
from torch_core.base.specs import ArraySpec
from torch_core.launch.plan import ABSENT, Argument, Descriptor, DeviceLimits, OperationPlan, Pointer

_ARRAYS = frozenset(
    ("query", "key", "value", "sinks", "out", "lse", "d_out", "d_lse", "query_start_loc", "key_start_loc")
)
_PREPARED = ("row_stats", "turns", "sink_parts", "d_query")
_WRITTEN = ("turns", "d_query", "d_query_sums", "d_key", "d_value")
# Shorter sequences leave too much of a tile of keys without work, and narrower windows both edges in one tile.
_MIN_LEN = 256
_MIN_WINDOW = 256
_ROWS = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@dataclass(frozen=True, slots=True)
class HopperBackwardTile:
    """Tile of hopper_backward_kernel."""

    block_m: int  # Queries of one step.
    query_stages: int  # Tiles of queries in shared memory: two to four.
    d_out_stages: int  # Tiles of output gradients in shared memory: two to four.
    # Registers of a thread that works on the gradients of keys and values, unless these are one role, which has the
    # registers that the others leave.
    key_registers: int = 208
    query_registers: int = 72  # Registers of a thread that works on the gradient of queries.
    load_registers: int = 24  # Registers of the other threads.
    heads_together: int = 1  # Key/value heads whose programs alternate, at most.
    block_n: int = 128  # Keys of a program: 128, or 64 where two warpgroups share the sums of the same keys.
    role_keys: int = 64  # Keys whose gradients one role works out: 64, or 128 by two warpgroups that keep in step.
    rises: bool = False  # In any order the later half of the tiles of keys takes the first queries first.
    part_width: int = 64  # Columns of the queries' gradients that one product makes: 64, or 128 of wide heads.

    @property
    def head_sizes(self) -> tuple[tuple[int, int], ...]:
        """Head sizes of keys, with those of values, that the kernel takes in such a tile."""
        return ((64, 64), (128, 128), (192, 128)) if self.block_n == 128 else ((256, 256),)


# Of wide heads.
_WIDE = HopperBackwardTile(64, 2, 2, key_registers=192, query_registers=104, block_n=64, part_width=128)
# Of keys of 192 elements over values of 128.
_UNEVEN = HopperBackwardTile(64, 3, 2, role_keys=128)
_LONG = HopperBackwardTile(64, 4, 2, heads_together=2, role_keys=128, rises=True)
# By head size, the tiles from a query length on.
_TILES: dict[int, tuple[tuple[int, HopperBackwardTile], ...]] = {
    64: ((0, HopperBackwardTile(64, 4, 4)), (2048, HopperBackwardTile(128, 4, 2, heads_together=4))),
    128: ((0, replace(_LONG, heads_together=1, rises=False)), (2048, _LONG)),
    192: ((0, _UNEVEN), (4096, replace(_UNEVEN, heads_together=4))),
    256: ((0, _WIDE),),
}


def hopper_backward_plan(
    call: DenseBackwardCall[ArraySpec], limits: DeviceLimits, *, tile: HopperBackwardTile | None = None
) -> OperationPlan | None:
    """Plans the gradients of queries, keys and values; None where the portable kernels serve the call better.

    The kernel takes bfloat16 and float16 with head sizes 64, 128 and 256, or 192 over values of 128, a positive scale,
    causal and window masks, a sink for each head; strides and alignments that the copy engine can follow. `tile` is one
    in place of the table's, for measurements and tests.
    """
    tile = tile or hopper_backward_tile(head_size=call.head_size, max_query_len=call.max_query_len)
    if tile is None or not _is_served(call, limits, tile):
        return None
    block_m, heads, head_size = tile.block_m, call.num_heads, call.head_size
    query, key, value = (array_matrix(call, name, tile.block_n) for name in ("query", "key", "value"))
    d_out = dense_matrix(call.d_out)
    tiles = call.num_tokens // block_m + call.num_seqs + 1
    stats = ArraySpec((heads * tiles * 2 * block_m,), "float32")
    if query is None or key is None or value is None or d_out is None or stats.shape[0] >= 2**31:
        return None
    scratch = {
        "row_stats": stats,
        "d_query_sums": ArraySpec((heads * tiles, block_m * head_size), "float32"),
        "turns": ArraySpec((heads * tiles,), "int32"),
    }
    outputs = call.outputs()
    if "d_sinks" in outputs:
        scratch["sink_parts"] = ArraySpec((heads, tiles), "float32")
    rises = tile.rises and not call.deterministic and call.spec.window_left is None
    known: dict[str, Any] = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": call.num_kv_heads,
        "GROUP": call.group,
        "HEADS_TOGETHER": math.gcd(call.num_kv_heads, tile.heads_together),
        "HEAD_SIZE": head_size,
        "REST_SIZE": head_size - call.value_head_size,
        "VALUE_SIZE": call.value_head_size,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "ROLE_KEYS": tile.role_keys,
        "PART_WIDTH": tile.part_width,
        # Heads of 128 gain nothing without order alone.
        "IN_ORDER": call.deterministic or (head_size == 128 and not rises),
        "RISES": rises,
        "QUERY_STAGES": tile.query_stages,
        "D_OUT_STAGES": tile.d_out_stages,
        "KEY_REGISTERS": tile.key_registers,
        "QUERY_REGISTERS": tile.query_registers,
        "LOAD_REGISTERS": tile.load_registers,
        "QUERY_STRIDE": query.head_stride,
        "D_OUT_STRIDE": d_out.head_stride,
        "KEY_STRIDE": key.head_stride,
        "VALUE_STRIDE": value.head_stride,
        "OUT_STRIDES": _strides(call.out),
        "D_OUT_STRIDES": _strides(call.d_out),
        **{f"{name.upper()}_STRIDES": _strides(outputs[name]) for name in ("d_query", "d_key", "d_value")},
    }
    pointers: dict[str, Argument] = {
        "sink_parts": ABSENT,
        **{name: Pointer(name) for name in (*outputs, *scratch)},
        "query_tiles": count(tiles),
        "num_keys": count(call.key.shape[0]),
    }
    dtype = call.query.dtype
    # Columns of a copy: a power of two, as tiles must have.
    width, value_width = (size & -size for size in (head_size, call.value_head_size))
    copies: dict[str, Argument] = {
        "query": copy_descriptor("query", query, (block_m, width), dtype),
        "key": copy_descriptor("key", key, (tile.block_n, width), dtype),
        "value": copy_descriptor("value", value, (tile.block_n, value_width), dtype),
        "d_out": copy_descriptor("d_out", d_out, (block_m, value_width), dtype),
        "row_stats": Descriptor("row_stats", stats.shape, (1,), (2 * block_m,), _ROWS),
    }
    programs = (call.key.shape[0] // tile.block_n + call.num_seqs + 1) * call.num_kv_heads
    prepared = tuple(name for name in _PREPARED if name in (*outputs, *scratch))
    rows = (tiles, heads)
    launches = [
        make_launch(prepare_backward_kernel, call, rows, known, arguments=pointers, writes=prepared),
        # Not hot: in the steps at the mask's edge some state outside the products is spilled.
        make_launch(
            hopper_backward_kernel, call, (programs,), known, arguments={**pointers, **copies},
            writes=_WRITTEN, num_warps=tile.role_keys // 16,
        ),
    ]  # fmt: skip
    if rises:
        launches.append(make_launch(finish_backward_kernel, call, rows, known, arguments=pointers, writes=("d_query",)))
    if "d_sinks" in outputs:
        launches.append(sum_parts_launch(call, "d_sinks", "sink_parts", tiles))
    return operation(call, tuple(launches), tuple(scratch.items()))


def hopper_backward_tile(*, head_size: int, max_query_len: int) -> HopperBackwardTile | None:
    """Returns the tile for a head size, None where there is none.

    Example:
        >>> [hopper_backward_tile(head_size=64, max_query_len=n).block_m for n in (512, 8192)]
        [64, 128]
    """
    tiles = [tile for length, tile in _TILES.get(head_size, ()) if length <= max_query_len]
    return tiles[-1] if tiles else None


def _is_served(call: DenseBackwardCall[ArraySpec], limits: DeviceLimits, tile: HopperBackwardTile) -> bool:
    dtypes = {x.dtype for x in (call.query, call.key, call.value, call.out, call.d_out) if x is not None}
    return (
        is_copied(call, limits, rest_size=call.head_size - call.value_head_size)
        and (call.head_size, call.value_head_size) in tile.head_sizes
        and call.arrays().keys() <= _ARRAYS
        and dtypes in ({"bfloat16"}, {"float16"})
        and call.max_query_len >= _MIN_LEN
        and _window(call) >= _MIN_WINDOW
    )


def _window(call: DenseBackwardCall[ArraySpec]) -> float:
    left, right = call.spec.window_left, 0 if call.spec.causal else call.spec.window_right
    return math.inf if left is None or right is None else left + right


def _strides(array: ArraySpec | None) -> tuple[int, ...]:
    return () if array is None else array.element_strides[:2]
