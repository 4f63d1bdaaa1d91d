"""The plan of the derivative of Mamba-2."""

from __future__ import annotations

from typing import Any

from torch_core.base.specs import ArraySpec
from torch_core.launch.operands import ceil_div, named_launch, power_of_two, strides
from torch_core.launch.plan import ABSENT, DeviceLimits, LaunchPlan, OperationPlan, Pointer
from torch_core.state.backward_call import MambaChunkScanBackwardCall
from torch_core.state.kernels.mamba.backward import mamba_both_states_kernel, mamba_pass_both_kernel
from torch_core.state.kernels.mamba.chunks import mamba_products_kernel
from torch_core.state.kernels.mamba.gradients import (
    mamba_group_gradients_kernel,
    mamba_step_gradients_kernel,
    mamba_sums_kernel,
    mamba_value_gradients_kernel,
)
from torch_core.state.kernels.mamba.parts import (
    LEAST_TILE,
    PASSED_ROWS,
    UNSPILT_STATE,
    WHOLE,
    arguments_of,
    constexprs_of,
    scratch_of,
    span_of,
    tiles_of,
)

# Tokens of a chunk, whose states go through memory: the fewer the chunks, the fewer bytes. float32 takes half of them.
_CHUNK = 64
# Rows of a state in a program that goes through chunks, and in a product of one that does not.
_ROWS, _BLOCK_ROWS = 32, 64
# Warps of a program of the gradients of values, and of those of B and C. Four spill a few registers; with eight all
# gradients took a tenth longer.
_VALUE_WARPS, _GROUP_WARPS = 4, 8
# Elements of a state that a program takes; float32 needs twice the registers.
_STATE_ELEMENTS = 8192
# Heads of a part whose gradients of B and C are summed in registers; sums of fewer cost more memory traffic.
_LEAST_MEMBERS = 4
# Programs that fill a multiprocessor.
_PROGRAMS = 2
# Programs of a span that a multiprocessor holds.
_RESIDENT = 4
# Three chunks need up to 110 KB; smaller devices load a chunk when they need it.
_LARGE_SHARED_MEMORY = 112 * 1024


def plan_mamba_backward(call: MambaChunkScanBackwardCall[ArraySpec], limits: DeviceLimits) -> OperationPlan:
    """Plans a checked call that is not empty; buffers are named as the fields of the call and as its outputs."""
    arrays, outputs = call.arrays(), call.outputs()
    is_wide = call.x.dtype == "float32"
    tokens_of_chunk = _CHUNK // 2 if is_wide else _CHUNK
    constexprs = constexprs_of(call, tokens_of_chunk, LEAST_TILE)
    size, padded = max(LEAST_TILE, power_of_two(call.x.shape[2])), constexprs["STATE_PADDED"]
    rows = min(size, _ROWS, max(LEAST_TILE, _STATE_ELEMENTS // (2 if is_wide else 1) // padded))
    tiles = (call.num_heads, 2 * ceil_div(call.x.shape[2], rows))
    passed = min(rows, PASSED_ROWS)
    span = span_of(call, limits, tiles[0] * tiles[1], resident=_RESIDENT)
    chunks, spans = tiles_of(call, tokens_of_chunk), tiles_of(call, span)
    members = _members(call, chunks, limits)
    parts = call.num_heads // members
    scratch = scratch_of(call, tokens_of_chunk, span, spans, directions=2)
    scratch["kept"] = ArraySpec((chunks, call.num_heads, 2, *call.x.shape[2:], call.state_size), call.x.dtype)
    scratch["d_products"] = ArraySpec((chunks, parts, tokens_of_chunk, tokens_of_chunk), call.x.dtype)
    scratch["by_token"] = ArraySpec((4, call.num_heads, call.num_tokens), "float32")
    scratch["d_lasts"] = ArraySpec((chunks, call.num_heads), "float32")
    scratch["head_sums"] = ArraySpec((chunks, 3, call.num_heads), "float32")
    if parts > call.num_kv_heads:
        scratch |= {
            name: ArraySpec((call.num_tokens, parts, call.state_size), "float32") for name in ("B_sums", "C_sums")
        }
    optional = ("span_decays", "d_last", "d_initial", "d_D", "d_dt_bias", "kept", "B_sums", "C_sums")
    arguments = {
        **dict.fromkeys(optional, ABSENT),
        **arguments_of(call, arrays, {**outputs, **scratch}),
        **strides("d_out", ("token", "head"), call.d_out),
    }
    constexprs |= {
        "DIM_PADDED": size,
        "MEMBERS": members,
        "MIN_TOKENS": 1,
        "BLOCK_ROWS": rows,
        "SPAN": span,
        "BINARY": False,
    }

    def launch(kernel: Any, grid: tuple[int, ...], *writes: str, **changes: Any) -> LaunchPlan:
        own, sizes = {**arguments, **changes.pop("arguments", {})}, {**constexprs, **changes.pop("constexprs", {})}
        return named_launch(kernel, grid, own, sizes, writes=writes, **{"num_stages": 1, **changes})

    initial = tuple(name for name in outputs if name == "d_initial")
    through: dict[str, Any] = {"num_stages": 3 if limits.shared_memory >= _LARGE_SHARED_MEMORY else 1, "hot": True}
    launches = [launch(mamba_products_kernel, (chunks, call.num_kv_heads), "products", "steps", "decays")]
    if span != WHOLE:
        written = ("span_states", "span_decays")
        launches += [
            launch(
                mamba_both_states_kernel, (spans, *tiles), *written,
                arguments=dict.fromkeys(("kept", "d_initial"), ABSENT), **through,
            ),
            launch(
                mamba_pass_both_kernel, (call.num_seqs, tiles[0], 2 * ceil_div(call.x.shape[2], passed)), "span_states",
                *initial, constexprs={"BLOCK_ROWS": passed},
            ),
        ]  # fmt: skip
    summed = {f"d_{name}": Pointer(f"{name}_sums") for name in ("B", "C") if f"{name}_sums" in scratch}
    tokens = tuple(argument.buffer for argument in (summed.get(f"d_{name}", Pointer(f"d_{name}")) for name in "BC"))
    blocks = {"BLOCK_ROWS": min(size, LEAST_TILE if is_wide else _BLOCK_ROWS)}
    # Of two heads: the next one's rows and state are loaded during the products of this one.
    fits = size == blocks["BLOCK_ROWS"] and padded <= UNSPILT_STATE and limits.shared_memory >= _LARGE_SHARED_MEMORY
    heads = tuple(name for name in ("d_A", "d_D", "d_dt_bias") if name in outputs)
    launches += [
        launch(mamba_both_states_kernel, (spans, *tiles), *initial, "kept", **through),
        launch(
            mamba_value_gradients_kernel, (chunks, parts), "d_x", "d_products", "by_token", "head_sums",
            constexprs=blocks, num_warps=_VALUE_WARPS, num_stages=2 if fits else 1,
        ),
        launch(
            mamba_group_gradients_kernel, (2 * chunks, parts), *tokens, "by_token", "d_lasts", arguments=summed,
            constexprs=blocks, num_warps=_GROUP_WARPS, hot=not is_wide and padded <= UNSPILT_STATE,
        ),
        launch(
            mamba_step_gradients_kernel, (chunks, ceil_div(call.num_heads, constexprs["BLOCK_HEADS"])), "d_dt",
            "head_sums",
        ),
        launch(
            mamba_sums_kernel, (ceil_div(call.num_tokens, constexprs["BLOCK_T"]) if summed else 1, call.num_kv_heads),
            *heads, *summed, arguments={} if summed else dict.fromkeys(("d_B", "d_C"), ABSENT),
        ),
    ]  # fmt: skip
    return OperationPlan.of(call.name, arrays, tuple(launches), outputs, scratch)


def _members(call: MambaChunkScanBackwardCall[ArraySpec], chunks: int, limits: DeviceLimits) -> int:
    """Returns the heads of a program: those of a group, or fewer if that leaves multiprocessors without a program."""
    members = call.num_heads // call.num_kv_heads
    while (
        members % 2 == 0 and members > _LEAST_MEMBERS and chunks * call.num_heads < members * _PROGRAMS * limits.num_sms
    ):
        members //= 2
    return members
