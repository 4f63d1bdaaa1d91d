"""The torch operations through their launch plans, whatever the device: on a CPU in Triton's interpreter.

The names and arguments are those of `torch_core.ops`, which computes CPU tensors in plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.interpret import run_interpreted_operation
from torch_core import ops
from torch_core.attention.checks import cache_fields
from torch_core.attention.merge_call import MergeCall
from torch_core.cache_writes.call import CopyCall, WriteCall
from torch_core.launch.call import Call
from torch_core.launch.plan import DeviceLimits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec, dtype_name, empty_results

__all__ = [
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "merge_states",
    "paged_attention",
    "paged_attention_with_lse",
    "run_triton",
    "write_kv_cache",
]

# The interpreter runs no Gluon kernel: plans for it choose as if this were an older device.
_INTERPRETED = DeviceLimits(arch=89)


def run_triton(call: Call[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the kernels of a call, interpreted on a CPU; returns its results by name."""
    arrays = call.arrays()
    device = next(iter(arrays.values())).device
    if device.type == "cuda":
        return ops.run(call)
    if call.is_empty:
        call.map(array_spec).check()
        return empty_results(call, arrays, device)
    call = call.for_kernels(torch)
    plan = plan_call(call.map(array_spec), _INTERPRETED)
    results = run_interpreted_operation(plan, call.arrays())
    return {**results, **{name: arrays[name] for name in call.written if name in ("out", "lse")}}


def paged_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    return run_triton(ops.paged_call(*args, **kwargs))["out"]


def paged_attention_with_lse(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    results = run_triton(replace(ops.paged_call(*args, **kwargs), with_lse=True))
    return results["out"], results["lse"]


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    return run_triton(ops.dense_call(*args, **kwargs))["out"]


def attention_with_lse(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    results = run_triton(replace(ops.dense_call(*args, **kwargs), with_lse=True))
    return results["out"], results["lse"]


def write_kv_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: torch.Tensor, **scales: Any
) -> None:
    run_triton(WriteCall(key=key, value=value, **cache_fields(kv_cache), slot_mapping=slot_mapping, **scales))


def copy_blocks(kv_caches: Any, block_mapping: torch.Tensor) -> None:
    for kv_cache in [kv_caches] if isinstance(kv_caches, torch.Tensor) else kv_caches:
        run_triton(CopyCall(kv_cache=kv_cache, block_mapping=block_mapping))


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    name = None if out_dtype is None else dtype_name(out_dtype)
    results = run_triton(MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out_dtype=name, **options))
    return results["out"], results["lse"]
