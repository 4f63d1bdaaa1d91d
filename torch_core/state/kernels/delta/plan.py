"""The plans of the gated delta rule, token by token and chunk by chunk: from shapes, dtypes and options alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import block_seqs, ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, Argument, DeviceLimits, LaunchPlan, OperationPlan, Pointer, Scalar
from torch_core.state.delta_call import L2NORM_EPSILON, GatedDeltaCall
from torch_core.state.kernels.delta.channels import gated_delta_channels_kernel, gated_delta_pairs_kernel
from torch_core.state.kernels.delta.chunks import (
    gated_delta_chunks_kernel,
    gated_delta_starts_kernel,
    gated_delta_summaries_kernel,
)
from torch_core.state.kernels.delta.kernel import gated_delta_kernel
from torch_core.state.kernels.delta.systems import gated_delta_inverses_kernel, gated_delta_overlaps_kernel

# Elements of a state that one warp holds. More warps of a program would have to wait for each other.
_STATE_ELEMENTS = 1024
_PADDED_ROWS = 16
# Batches whose sequences are not longer go token by token, and so does float32, whose products do not fit registers.
_FEW_TOKENS = 32
_CHUNK = 64
_LARGEST_HEAD = 256
# Keys of this size and smaller leave registers for 16 rows of a state in each warp, and for segments.
_SMALL_KEY = 128
# A pipeline of three chunks needs up to 223 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY = 226 * 1024
# Matrix units take 16 rows and columns and more.
_LEAST_TILE = 16
_START_ROWS = 16
_LEAST_SEGMENT = 8
# Fewer segments cost more than they gain, because all chunks but those of the last one are computed twice.
_LEAST_SEGMENTS = 4
_BLOCK_K = 32
_SHARED_PRODUCTS = 4
# The arrays that only gates of channels need.
_BY_CHANNEL = ("reads", "queries", "adds", "through")


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
    in_chunks = (
        call.max_query_len > _FEW_TOKENS
        and max(call.key.shape[2], call.value.shape[2]) <= _LARGEST_HEAD
        and call.key.dtype != "float32"
        and call.query.dtype == call.key.dtype == call.value.dtype
    )
    in_place = tuple(name for name in call.written if name != "out")
    tile = _tile(call, limits)
    scratch = _scratch(call, tile.segment) if in_chunks else {}
    arguments = _arguments(call, arrays, results["out"], scratch)
    launches = _in_chunks(call, arguments, tile) if in_chunks else _by_token(call, arguments)
    return OperationPlan(
        name=call.name, inputs=tuple(arrays.items()), outputs=(("out", results["out"]),), in_place=in_place,
        scratch=tuple(scratch.items()), launches=launches,
    )  # fmt: skip


def _by_token(call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument]) -> tuple[LaunchPlan, ...]:
    rows = min(power_of_two(call.value.shape[2]), max(1, _STATE_ELEMENTS // power_of_two(call.key.shape[2])))
    constexprs = {**_constexprs(call, 1), "BLOCK_V": rows}
    grid = (call.num_seqs, call.num_heads, ceil_div(call.value.shape[2], rows))
    launch = named_launch(
        gated_delta_kernel, grid, arguments, constexprs, writes=_written(call), num_warps=1, num_stages=1, hot=True
    )
    return (launch,)


def _in_chunks(call: GatedDeltaCall[ArraySpec], arguments: dict[str, Argument], tile: _Tile) -> tuple[LaunchPlan, ...]:
    constexprs = _constexprs(call, _LEAST_TILE)
    key_rows, value_rows = constexprs["KEY_PADDED"], constexprs["VALUE_PADDED"]
    is_small = key_rows <= _SMALL_KEY
    group = call.num_heads // call.num_kv_heads
    # Few heads share less than more programs at the same time gain.
    members = group if group >= _SHARED_PRODUCTS else 1
    constexprs |= {
        "BLOCK_V": tile.rows,
        "BLOCK_R": _START_ROWS,
        "MEMBERS": members,
        "BLOCK_K": min(_BLOCK_K, key_rows),
        "CHUNK": _CHUNK,
        # Errors of a product are then small beside a rounding to the operands' type.
        "PRECISION": "tf32" if call.key.dtype == "bfloat16" else "tf32x3",
        "SEGMENT": tile.segment or 0,
    }
    warps = 8 if tile.rows > 64 or not is_small else 4
    # Gates of channels let the compiler spill what it needs once for each sequence.
    through: dict[str, Any] = {"num_warps": warps, "num_stages": tile.stages, "hot": is_small and call.gk is None}
    once: dict[str, Any] = {"num_stages": 1, "hot": is_small}
    chunks, heads = _tiles(call, 1), call.num_heads

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **options)

    if call.gk is None:
        written = ("overlaps", "products", "factors")
        registers = 128 if members == 1 and is_small else None
        grid = (chunks, heads // members)
        launches = [launch(gated_delta_overlaps_kernel, grid, *written, maxnreg=registers, **once)]
    else:
        written = ("factors", "decays", *_BY_CHANNEL)
        launches = [
            launch(gated_delta_channels_kernel, (chunks, heads), *written, num_warps=8, **once),
            launch(gated_delta_pairs_kernel, (chunks, heads), "overlaps", "products", **once),
        ]
    # A warp for each chunk: its blocks of 16 then need no barrier.
    launches.append(launch(gated_delta_inverses_kernel, (chunks, heads), "inverses", num_warps=1, **once))
    tiles = call.num_seqs
    if tile.segment is not None:
        tiles = _tiles(call, tile.segment)
        grid = (tiles, heads, ceil_div(value_rows + key_rows, tile.rows))
        launches.append(launch(gated_delta_summaries_kernel, grid, "summaries", **through))
        grid = (call.num_seqs, heads, value_rows // _START_ROWS)
        launches.append(
            launch(gated_delta_starts_kernel, grid, "summaries", num_warps=8, num_stages=tile.stages, hot=True)
        )
    grid = (tiles, heads, ceil_div(value_rows, tile.rows))
    return (*launches, launch(gated_delta_chunks_kernel, grid, *_written(call), **through))


def _tile(call: GatedDeltaCall[ArraySpec], limits: DeviceLimits) -> _Tile:
    """Returns the largest parts that give each multiprocessor a program."""
    value_rows = max(_LEAST_TILE, power_of_two(call.value.shape[2]))
    is_small = call.key.shape[2] <= _SMALL_KEY
    is_large = limits.shared_memory >= _LARGE_SHARED_MEMORY and is_small
    rows = min(value_rows, 128 if is_large and call.gk is None else 64)
    programs = call.num_seqs * call.num_heads * ceil_div(value_rows, rows)
    chunks, segments = ceil_div(call.max_query_len, _CHUNK), limits.num_sms // programs
    stages = 3 if is_large else 1
    if segments >= _LEAST_SEGMENTS and is_small:
        segment = max(_LEAST_SEGMENT, power_of_two(ceil_div(chunks, segments)))
        if segment < chunks:
            return _Tile(rows, stages, segment)
    return _Tile(rows if programs >= limits.num_sms else min(rows, 64), stages, None)


def _tiles(call: GatedDeltaCall[ArraySpec], chunks: int) -> int:
    """Returns a bound of the number of tiles of some chunks."""
    return call.num_tokens // (chunks * _CHUNK) + call.num_seqs


def _written(call: GatedDeltaCall[ArraySpec]) -> tuple[str, ...]:
    return ("out",) if call.states is None else ("states", "out")


def _constexprs(call: GatedDeltaCall[ArraySpec], least: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": call.num_heads,
        "GROUP": call.num_heads // call.num_kv_heads,
        "KEY_SIZE": call.key.shape[2],
        "KEY_PADDED": max(least, power_of_two(call.key.shape[2])),
        "VALUE_SIZE": call.value.shape[2],
        "VALUE_PADDED": max(least, power_of_two(call.value.shape[2])),
        "NORMALIZE": call.use_qk_l2norm_in_kernel,
        "BLOCK_SEQS": block_seqs(call.num_seqs),
        "BLOCK_T": _PADDED_ROWS,
    }


def _scratch(call: GatedDeltaCall[ArraySpec], segment: int | None) -> dict[str, ArraySpec]:
    chunks, dtype, key_size = (_tiles(call, 1), call.num_heads), call.key.dtype, call.key.shape[2]
    scratch = {
        "overlaps": ArraySpec((*chunks, _CHUNK, _CHUNK), "float32"),
        "inverses": ArraySpec((*chunks, _CHUNK, _CHUNK), dtype),
        "products": ArraySpec((*chunks, _CHUNK, _CHUNK), dtype),
        "factors": ArraySpec((*chunks, 5, _CHUNK), "float32"),
    }
    if call.gk is not None:
        scratch["decays"] = ArraySpec((*chunks, _CHUNK, key_size), "float32")
        scratch |= {name: ArraySpec((*chunks, _CHUNK, key_size), dtype) for name in _BY_CHANNEL[:3]}
        scratch["through"] = ArraySpec((*chunks, key_size), "float32")
    if segment is not None:
        sizes = _constexprs(call, _LEAST_TILE)
        keys, values = sizes["KEY_PADDED"], sizes["VALUE_PADDED"]
        scratch["summaries"] = ArraySpec((_tiles(call, segment), call.num_heads, values + keys, keys), "float32")
    return scratch


def _arguments(
    call: GatedDeltaCall[ArraySpec], arrays: dict[str, ArraySpec], out: ArraySpec, scratch: dict[str, ArraySpec]
) -> dict[str, Argument]:
    absent = ArraySpec((1, 1, 1, 1), "float32")
    optional = ("g", "gk", "cache_indices", "has_initial_state", "states", "summaries", *_BY_CHANNEL)
    return {
        **dict.fromkeys(optional, ABSENT),
        **{name: Pointer(name) for name in (*arrays, *scratch, "out")},
        "num_tokens": Scalar(call.num_tokens, "i32", specialize=False),
        "num_seqs": Scalar(call.num_seqs, "i32", specialize=False),
        "num_states": Scalar(0 if call.states is None else call.states.shape[0], "i32", specialize=False),
        "scale": Scalar(call.scale, "fp32"),
        "epsilon": Scalar(L2NORM_EPSILON, "fp32"),
        **strides("query", ("token", "head"), call.query),
        **strides("key", ("token", "head"), call.key),
        **strides("value", ("token", "head"), call.value),
        **strides("beta", ("token",), call.beta),
        **strides("g", ("token",), arrays.get("g", absent)),
        **strides("gk", ("token", "head"), arrays.get("gk", absent)),
        **strides("states", ("slot", "head", "row"), arrays.get("states", absent)),
        **strides("out", ("token", "head"), out),
    }
