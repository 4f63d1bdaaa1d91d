"""The plan of the gated delta rule's derivative."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, strides
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan, OperationPlan
from torch_core.state.delta_backward_call import GatedDeltaBackwardCall
from torch_core.state.kernels.delta.backward import (
    gated_delta_gradients_kernel,
    gated_delta_kept_states_kernel,
    gated_delta_state_gradients_kernel,
)
from torch_core.state.kernels.delta.parts import (
    LEAST_TILE,
    arguments_of,
    chunk_tiles,
    constexprs_of,
    scratch_of,
    system_launches,
)

# Rows of a state in a program that goes through chunks, and columns of values at a time in one that does not.
_ROWS = 64
_COLUMNS = 32
# Three chunks need 173 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY = 174 * 1024


def plan_gated_delta_backward(call: GatedDeltaBackwardCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call and as its outputs."""
    arrays, outputs, scratch = call.arrays(), call.outputs(), scratch_of(call, None)
    chunks, sizes = chunk_tiles(call, 1), (call.value.shape[2], call.key.shape[2])
    for name in ("befores", "d_afters"):
        scratch[name] = ArraySpec((chunks, call.num_heads, *sizes), call.key.dtype)
    arguments = {
        **dict.fromkeys(("d_last", "d_g", "d_initial"), ABSENT),
        **arguments_of(call, arrays, {**outputs, **scratch}),
        **strides("d_out", ("token", "head"), call.d_out),
    }
    constexprs = constexprs_of(call, LEAST_TILE)
    columns = min(_COLUMNS, constexprs["VALUE_PADDED"])
    constexprs["BLOCK_V"] = min(_ROWS, constexprs["VALUE_PADDED"])
    stages = 3 if limits.shared_memory >= _LARGE_SHARED_MEMORY else 1
    tiles = (call.num_seqs, call.num_heads, ceil_div(sizes[0], constexprs["BLOCK_V"]))

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **options: Any) -> LaunchPlan:
        return named_launch(kernel, grid, arguments, constexprs, writes=writes, **options)

    through: dict[str, Any] = {"num_stages": stages, "hot": True}
    initial = tuple(name for name in outputs if name == "d_initial")
    launches = [
        *system_launches(call, arguments, constexprs),
        launch(gated_delta_kept_states_kernel, tiles, "befores", **through),
        launch(gated_delta_state_gradients_kernel, tiles, "d_afters", *initial, **through),
    ]
    constexprs = {**constexprs, "BLOCK_V": columns}
    gradients = tuple(name for name in outputs if name not in initial)
    grid = (chunks, call.num_kv_heads)
    launches.append(launch(gated_delta_gradients_kernel, grid, *gradients, num_stages=1, num_warps=8))
    return OperationPlan.of(call.name, arrays, tuple(launches), outputs, scratch)
