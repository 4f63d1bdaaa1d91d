"""The plan of the gated delta rule's derivative."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, strides
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan, OperationPlan
from torch_core.state.backward_call import GatedDeltaBackwardCall
from torch_core.state.kernels.delta.backward import gated_delta_both_states_kernel
from torch_core.state.kernels.delta.channels_backward import (
    gated_delta_channel_gradients_kernel,
    gated_delta_near_gradients_kernel,
    gated_delta_parts_kernel,
)
from torch_core.state.kernels.delta.gradients import (
    gated_delta_gate_gradients_kernel,
    gated_delta_key_gradients_kernel,
    gated_delta_product_gradients_kernel,
    gated_delta_value_gradients_kernel,
)
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

# Rows of a state in a program that goes through chunks, and columns of values at a time in one that does not; of
# float32 and of heads over 128 fewer fit registers and memory.
_ROWS, _WIDE_ROWS = 64, 32
_COLUMNS, _WIDE_COLUMNS = 32, 16
# Channels of a program of gates of channels, and tokens of one of keys and products: rows of their products.
_CHANNELS, _TOKENS = 32, 32
# ptxas spills much more if it may choose fewer registers.
_MOST_REGISTERS = 255
# Three chunks need 173 KB, with gates of channels 224 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY, _LARGE_BY_CHANNEL = 174 * 1024, 226 * 1024


def plan_gated_delta_backward(call: GatedDeltaBackwardCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call and as its outputs."""
    arrays, outputs, scratch = call.arrays(), call.outputs(), scratch_of(call, None)
    chunks, sizes = chunk_tiles(call, 1), (call.value.shape[2], call.key.shape[2])
    for name in ("befores", "d_afters"):
        scratch[name] = ArraySpec((chunks, call.num_heads, *sizes), call.key.dtype)
    for name, height in (("corrections", sizes[0]), ("d_rights", sizes[0])):
        scratch[name] = ArraySpec((chunks, call.num_heads, height, CHUNK), call.key.dtype)
    for name in ("d_overlaps", "d_products", "lowers"):
        scratch[name] = ArraySpec((chunks, call.num_heads, CHUNK, CHUNK), call.key.dtype)
    if call.gk is None:
        scratch["norms"] = ArraySpec((chunks, call.num_heads, 2, CHUNK), "float32")
        for name in ("decay_parts", "result_parts"):
            scratch[name] = ArraySpec((chunks, call.num_heads, CHUNK), "float32")
    else:
        scratch["gate_parts"] = ArraySpec((chunks, call.num_heads, CHUNK, sizes[1]), "float32")
        for name in ("query_parts", "key_parts"):
            scratch[name] = ArraySpec((chunks, call.num_heads, CHUNK, sizes[1]), call.key.dtype)
    constexprs = constexprs_of(call, LEAST_TILE)
    padded = constexprs["VALUE_PADDED"]
    is_wide = call.key.dtype == "float32" or max(padded, constexprs["KEY_PADDED"]) > SMALL_KEY
    columns = min(_WIDE_COLUMNS if is_wide else _COLUMNS, padded)
    arguments = {
        **dict.fromkeys(("d_last", "d_initial", "decay_parts"), ABSENT),
        **arguments_of(call, arrays, {**outputs, **scratch}),
        **strides("d_out", ("token", "head"), call.d_out),
    }
    constexprs["BLOCK_V"] = min(_WIDE_ROWS if is_wide else _ROWS, padded)
    is_large = limits.shared_memory >= (_LARGE_SHARED_MEMORY if call.gk is None else _LARGE_BY_CHANNEL)
    stages = 3 if is_large and not is_wide else 1
    tiles = (call.num_seqs, call.num_heads, 2 * ceil_div(sizes[0], constexprs["BLOCK_V"]))

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **options)

    through: dict[str, Any] = {"num_stages": stages, "hot": not is_wide}
    initial = tuple(name for name in outputs if name == "d_initial")
    launches = [
        *system_launches(call, arguments, constexprs),
        launch(gated_delta_both_states_kernel, tiles, "befores", "d_afters", *initial, **through),
    ]
    constexprs |= {
        "BLOCK_V": columns,
        "BLOCK_C": _TOKENS,
        "BLOCK_K": min(_CHANNELS, constexprs["KEY_PADDED"]),
    }
    once: dict[str, Any] = {"num_stages": 1, "num_warps": 8 if is_wide else 4, "maxnreg": _MOST_REGISTERS}
    grid, tiles = (chunks, call.num_heads), CHUNK // _TOKENS
    decays = ("decay_parts",) if call.gk is None else ()
    written = ("d_value", "d_beta", *decays, "corrections", "d_rights")
    launches.append(launch(gated_delta_value_gradients_kernel, grid, *written, **once))
    constexprs["BLOCK_V"] = columns if is_wide else min(_ROWS, padded)
    pairs = ("d_overlaps", "d_products")
    launches.append(launch(gated_delta_product_gradients_kernel, grid, *pairs, num_stages=1, num_warps=2))
    if call.gk is None:
        by_key = (chunks * call.num_kv_heads * tiles,)
        twice = {**once, "num_stages": 2 if is_large and not is_wide else 1}
        launches.append(launch(gated_delta_key_gradients_kernel, by_key, "result_parts", "d_query", "d_key", **twice))
        if call.g is not None:
            launches.append(launch(gated_delta_gate_gradients_kernel, grid, "d_g", num_warps=1, num_stages=1))
    else:
        tiles = ceil_div(sizes[1], constexprs["BLOCK_K"])
        near, by_tile = (*grid, CHUNK // 16 * tiles), (chunks * call.num_heads * tiles,)
        by_channel = ("query_parts", "key_parts")
        constexprs["BLOCK_V"] = columns if is_wide else padded
        launches += [
            # A warp for 16 tokens needs no barrier.
            launch(gated_delta_near_gradients_kernel, near, *by_channel, "gate_parts", num_warps=1, num_stages=1),
            launch(gated_delta_channel_gradients_kernel, by_tile, "d_gk", *by_channel, **once),
            launch(gated_delta_parts_kernel, (chunks, call.num_kv_heads), "d_query", "d_key"),
        ]
    return OperationPlan.of(call.name, arrays, tuple(launches), outputs, scratch)
