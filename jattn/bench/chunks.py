"""Chunks of new tokens on earlier ones: each kernel that could serve them, next to the plan's choice and to FA3."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jattn.bench import measure, mixed, peers
from jattn.bench.report import OURS, BenchReport, Row
from torch_core.attention.hopper.plan import hopper_launch
from torch_core.attention.rows.plan import rows_launch
from torch_core.calls import PagedCall
from torch_core.plan.plan import DeviceLimits, OperationPlan
from torch_core.planner import plan_call
from torch_core.run import array_spec
from torch_core.run.launch import run_operation
from torch_core.specs import ArraySpec, AttentionSpec

__all__ = ["CONTEXTS", "SHAPES", "plans", "run"]

#: (sequences, new tokens of each): batches that fill the device first, then some that leave it half empty.
SHAPES = ((64, 16), (32, 32), (16, 64), (8, 128), (8, 512), (4, 32), (1, 64), (1, 128))
#: Tokens before the new ones.
CONTEXTS = (2048, 8192)


def run(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    peers_directory: Path | None = None,
) -> BenchReport:
    """Measures chunks by graph replay over cold caches: 32 query heads, 8 key/value heads of 128, bfloat16, block 16.

    Args:
        shapes: (sequences, new tokens of each).
        contexts: tokens before them.
        peers_directory: see `jattn.bench.peers.load_peers`.

    Returns:
        A row for each shape and context, in microseconds; a column for each of `plans`, and FA3's.

    Raises:
        Unsupported: torch or JAX has no CUDA device.
    """
    measure.require_cuda("prefill")
    found = peers.load_peers(peers_directory)
    copy, matmul = measure.copy_bytes_per_second(), measure.matmul_flops()
    rows, notes = [], []
    for before in contexts:
        for seqs, new in shapes:
            parts = ((seqs, new, before),)
            first = mixed.random_batch(parts)
            batches = [first] + [mixed.random_batch(parts) for _ in range(measure.num_pools(first.kv_cache.nbytes) - 1)]
            times: dict[str, float] = {}
            for name, call in _columns(found, first).items():
                try:
                    times[name] = measure.graph_us([call(batch) for batch in batches])
                except Exception as error:  # A kernel that fails is a note, not the end of the table.
                    if name == OURS:
                        raise
                    times[name] = math.nan
                    notes.append(f"{name} at {seqs} x {new} on {before}: {str(error).splitlines()[0][:160]}")
            rows.append(Row(f"{seqs} x {new} on {before}", mixed.bound_us(parts, copy, matmul), times))
            del first, batches
            gc.collect()
            torch.cuda.empty_cache()
    return BenchReport(
        name="chunks, us",
        device=measure.device_name(),
        versions=measure.versions(),
        copy_bytes_per_second=copy,
        matmul_flops=matmul,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def plans(call: PagedCall[ArraySpec]) -> dict[str, OperationPlan]:
    """Returns the plan of a call and, in one launch each, the kernels that it could choose; needs no device."""
    base, limits = plan_call(call), DeviceLimits()
    launches = {
        f"{OURS} portable": rows_launch(call, min_query=1),
        f"{OURS} Hopper packed": hopper_launch(call, limits, min_query=1, pack=call.group),
        f"{OURS} Hopper unpacked": hopper_launch(call, limits, min_query=1, pack=1),
    }
    forced = {name: replace(base, launches=(launch,), scratch=()) for name, launch in launches.items() if launch}
    return {OURS: base, **forced}


def _columns(found: Any, batch: mixed.Batch) -> dict[str, Callable[[mixed.Batch], Callable[[], Any]]]:
    columns: dict[str, Callable[[mixed.Batch], Callable[[], Any]]] = {
        name: lambda batch, plan=plan: _run(plan, batch) for name, plan in plans(_call(batch).map(array_spec)).items()
    }
    if found is not None:
        columns["FA3"] = lambda batch: mixed.fa3_call(found, batch)
    return columns


def _run(plan: OperationPlan, batch: mixed.Batch) -> Callable[[], Any]:
    arrays = _call(batch).arrays()
    return lambda: run_operation(plan, arrays, {"out": batch.out})


def _call(batch: mixed.Batch) -> PagedCall[torch.Tensor]:
    return PagedCall(
        query=batch.query,
        kv_cache=batch.kv_cache,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.starts,
        spec=AttentionSpec(scale=batch.query.shape[-1] ** -0.5),
        max_query_len=batch.max_query_len,
    )
