"""The plans of the gated delta rule, token by token and chunk by chunk: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_core.base.specs import HOPPER_ARCH, ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two
from torch_core.launch.plan import Argument, DeviceLimits, LaunchPlan, OperationPlan
from torch_core.state.delta_call import GatedDeltaCall
from torch_core.state.kernels.delta.chunks import (
    gated_delta_chunks_kernel,
    gated_delta_starts_kernel,
    gated_delta_summaries_kernel,
)
from torch_core.state.kernels.delta.few import KEY_SIZE, TOKENS, gated_delta_few_kernel
from torch_core.state.kernels.delta.few_channels import TURN, gated_delta_few_by_channel_kernel
from torch_core.state.kernels.delta.kernel import gated_delta_kernel
from torch_core.state.kernels.delta.one import ROWS, gated_delta_one_kernel
from torch_core.state.kernels.delta.parts import (
    CHUNK,
    LEAST_TILE,
    SMALL_KEY,
    arguments_of,
    chunk_tiles,
    constexprs_of,
    scratch_of,
    system_launches,
)

# Elements of a state that one warp holds: of one token, of several, and of several with gates of channels of which some
# are kept. A program has one warp: more would have to wait for each other.
_ONE_TOKEN, _TOKENS, _KEPT_TOKENS = 1024, 2048, 4096
# If a multiprocessor gets fewer programs of one token than that, they have half as many elements.
_FEW_PROGRAMS = 8
# The fewest tokens that are taken together, without gates of channels and with them.
_LEAST_FEW, _LEAST_BY_CHANNEL = 4, 3
# Batches whose sequences are not longer go token by token, and so does float32, whose products do not fit registers.
_FEW_TOKENS = 32
_LARGEST_HEAD = 256
# A pipeline of three chunks needs up to 223 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY = 226 * 1024
_START_ROWS = 16
_LEAST_SEGMENT = 8
# Fewer segments cost more than they gain, because all chunks but those of the last one are computed twice.
_LEAST_SEGMENTS = 4
# Segments of that many chunks and fewer go faster with half the rows, which leave them longer.
_SHORT_SEGMENT, _HALF_ROWS = 32, 64
# Two programs of a summary then fit a multiprocessor: more than one of all rows, which results of chunks need.
_SUMMARY_ROWS = 64


class _Tile(NamedTuple):
    """The part of a state that a program takes through the chunks, and of a sequence.

    Attributes:
        rows: rows of the state.
        stages: chunks that are loaded ahead, and one.
        segment: chunks of a segment; None for all of a sequence.
    """

    rows: int
    stages: int
    segment: int | None


def plan_gated_delta(call: GatedDeltaCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call."""
    arrays = call.arrays()
    results = {**call.outputs(), **({} if call.out is None else {"out": arrays.pop("out")})}
    # The state within a chunk is never computed.
    in_chunks = (
        call.max_query_len > _FEW_TOKENS
        and call.num_kept_tokens is None
        and max(call.key.shape[2], call.value.shape[2]) <= _LARGEST_HEAD
        and call.key.dtype != "float32"
        and call.query.dtype == call.key.dtype == call.value.dtype
    )
    in_place = tuple(name for name in call.written if name != "out")
    tile = _tile(call, limits)
    scratch = scratch_of(call, tile.segment) if in_chunks else {}
    arguments = arguments_of(call, arrays, {**scratch, "out": results["out"]})
    if in_chunks:
        launches = _in_chunks(call, arguments, tile)
    else:
        launches = (_together(call, arguments, limits) or _by_token(call, arguments, limits),)
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        scratch=tuple(scratch.items()), launches=launches,
    )  # fmt: skip


def _together(
    call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument], limits: DeviceLimits
) -> LaunchPlan | None:
    """Returns the launch of one token, or of a few tokens together; None where no kernel of Hopper's serves them."""
    if call.states is None or call.key.shape[2] != KEY_SIZE.value or limits.arch != HOPPER_ARCH:
        return None
    is_narrow = call.query.dtype == call.key.dtype != "float32"
    is_short = call.max_query_len <= TURN.value
    options: dict[str, Any] = {"num_warps": 1, "hot": True}
    if call.max_query_len == 1:
        kernel, rows = gated_delta_one_kernel, ROWS.value
    elif not is_narrow or call.max_query_len < (_LEAST_FEW if call.gk is None else _LEAST_BY_CHANNEL):
        return None
    elif call.gk is not None:
        kernel, rows = gated_delta_few_by_channel_kernel, 16 if is_short and call.num_kept_tokens is None else 32
        options["hot"] = rows == 16
    elif call.max_query_len <= TOKENS.value:
        kernel, rows = gated_delta_few_kernel, 16
    else:
        return None
    gates, out = call.gk or call.g or call.beta, call.out or call.outputs()["out"]
    arrays = (call.query, call.key, call.value, call.beta, gates, out)
    constexprs = {
        **constexprs_of(call, 1),
        "STEPS": TURN.value if is_short else TOKENS.value,
        "BLOCK_V": rows,
        "TOKEN_STRIDES": tuple(array.element_strides[0] for array in arrays),
        "HEAD_STRIDES": tuple(array.element_strides[1] for array in arrays),
        "STATE_STRIDES": call.states.element_strides[:3],
    }
    grid = (call.num_seqs * call.num_heads * ceil_div(call.value.shape[2], rows),)
    return named_launch(kernel, grid, arguments, constexprs, writes=_written(call), **options)


def _by_token(call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument], limits: DeviceLimits) -> LaunchPlan:
    values, keys = power_of_two(call.value.shape[2]), power_of_two(call.key.shape[2])
    is_one = call.max_query_len == 1
    elements = _KEPT_TOKENS if call.gk is not None and call.num_kept_tokens is not None else _TOKENS
    rows = min(values, max(1, (_ONE_TOKEN if is_one else elements) // keys))
    heads = call.num_seqs * call.num_heads
    if is_one and heads * ceil_div(call.value.shape[2], rows) < _FEW_PROGRAMS * limits.num_sms:
        rows = max(1, rows // 2)
    constexprs = {**constexprs_of(call, 1), "BLOCK_V": rows, "ONE_TOKEN": is_one}
    if call.states is not None:
        constexprs["states_row_stride"] = call.states.element_strides[2]
    grid = (heads * ceil_div(call.value.shape[2], rows),)
    return named_launch(
        gated_delta_kernel, grid, arguments, constexprs, writes=_written(call), num_warps=1, num_stages=1, hot=True
    )


def _in_chunks(call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument], tile: _Tile) -> tuple[LaunchPlan, ...]:
    constexprs = constexprs_of(call, LEAST_TILE)
    key_rows, value_rows = constexprs["KEY_PADDED"], constexprs["VALUE_PADDED"]
    is_small = key_rows <= SMALL_KEY
    constexprs |= {"BLOCK_V": tile.rows, "BLOCK_R": _START_ROWS, "SEGMENT": tile.segment or 0}
    warps = 8 if tile.rows > 64 or not is_small else 4
    # Gates of channels let the compiler spill what it needs once for each sequence.
    through: dict[str, Any] = {"num_warps": warps, "num_stages": tile.stages, "hot": is_small and call.gk is None}
    heads, launches = call.num_heads, system_launches(call, arguments, constexprs)

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **options)

    tiles = call.num_seqs
    if tile.segment is not None:
        tiles, rows = chunk_tiles(call, tile.segment), min(tile.rows, _SUMMARY_ROWS)
        grid = (tiles, heads, ceil_div(value_rows + key_rows, rows))
        constexprs["BLOCK_V"] = rows
        written = ("summaries",) if call.g is None else ("summaries", "kept")
        launches.append(launch(gated_delta_summaries_kernel, grid, *written, **{**through, "num_warps": 4}))
        constexprs["BLOCK_V"] = tile.rows
        grid = (call.num_seqs, heads, value_rows // _START_ROWS)
        launches.append(
            launch(gated_delta_starts_kernel, grid, "summaries", num_warps=8, num_stages=tile.stages, hot=True)
        )
    grid = (tiles, heads, ceil_div(value_rows, tile.rows))
    return (*launches, launch(gated_delta_chunks_kernel, grid, *_written(call), **through))


def _tile(call: GatedDeltaCall[ArraySpec], limits: DeviceLimits) -> _Tile:
    """Returns the largest parts that give each multiprocessor a program, or half of them for short segments."""
    value_rows = max(LEAST_TILE, power_of_two(call.value.shape[2]))
    is_small = call.key.shape[2] <= SMALL_KEY
    is_large = limits.shared_memory >= _LARGE_SHARED_MEMORY and is_small
    rows = min(value_rows, 128 if is_large and call.gk is None else 64)
    chunks, stages = ceil_div(call.max_query_len, CHUNK), 3 if is_large else 1

    def programs(rows: int) -> int:
        return call.num_seqs * call.num_heads * ceil_div(value_rows, rows)

    halved = ((rows // 2, _SHORT_SEGMENT),) if rows // 2 >= _HALF_ROWS else ()
    for part, longest in (*halved, (rows, chunks)) if is_small else ():
        segments = limits.num_sms // programs(part)
        if segments >= _LEAST_SEGMENTS:
            segment = max(_LEAST_SEGMENT, power_of_two(ceil_div(chunks, segments)))
            if segment < chunks and segment <= longest:
                return _Tile(part, stages, segment)
    return _Tile(rows if programs(rows) >= limits.num_sms else min(rows, 64), stages, None)


def _written(call: GatedDeltaCall[ArraySpec]) -> tuple[str, ...]:
    return ("out",) if call.states is None else ("states", "out")
