"""Chunks of new tokens on earlier ones: each kernel that could serve them, next to the plan's choice and to FA3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jattn.bench.batch import Batch, cold_batches, fa3, paged_call
from jattn.bench.mixed import bound_us
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, sizes
from jattn.bench.session import Column, Session, in_graph
from torch_core.attention.call import PagedCall
from torch_core.attention.kernels.hopper.plan import hopper_launch
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch
from torch_core.attention.kernels.rows.plan import rows_launch
from torch_core.base.specs import ArraySpec
from torch_core.launch.launcher import run_operation
from torch_core.launch.plan import DeviceLimits, LaunchPlan, OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

#: Sequences and new tokens of each: batches that fill the device first, then some that leave it half empty.
SHAPES = ("64x16", "32x32", "16x64", "8x128", "8x512", "4x32", "1x64", "1x128")
#: Tokens before the new ones.
CONTEXTS = (2048, 8192)


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    fp8: bool = False,
    peers: Path | None = None,
) -> BenchReport:
    """Measures chunks by graph replay over cold caches: 32 query heads, 8 key/value heads of 128, bfloat16, block 16.

    Args:
        shapes: "SEQUENCESxNEW" tokens of each row.
        contexts: tokens before the new ones.
        fp8: e4m3 queries over an e4m3 cache.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.

    Returns:
        A row for each shape and context, in microseconds; a column for each of `plans`, and FA3's.
    """
    session = Session("prefill", peers)
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    for before in contexts:
        for seqs, new in map(sizes, shapes):
            parts = ((seqs, new, before),)
            batches = cold_batches(parts, query_dtype=element, cache_dtype=element)
            bound = bound_us(parts, session.copy, session.matmul, element_bytes=element.itemsize)
            row = Row(f"{seqs} x {new} on {before}", bound, {})
            session.add(row, _columns(session.peers, batches[0]), batches, required=(OURS,))
    return session.report(f"chunks, {'e4m3, ' if fp8 else ''}us")


def plans(call: PagedCall[ArraySpec]) -> dict[str, OperationPlan]:
    """Returns the plan of a call and, in one launch each, the kernels that it could choose; needs no device."""
    base, limits = plan_call(call), DeviceLimits()
    launches = {
        f"{OURS} portable": rows_launch(call, min_query=1),
        f"{OURS} Hopper packed": _hopper_launch(call, limits, pack=call.group),
        f"{OURS} Hopper unpacked": _hopper_launch(call, limits, pack=1),
    }
    forced = {name: replace(base, launches=(launch,), scratch=()) for name, launch in launches.items() if launch}
    return {OURS: base, **forced}


def _hopper_launch(call: PagedCall[ArraySpec], limits: DeviceLimits, *, pack: int) -> LaunchPlan | None:
    options: dict[str, Any] = {"min_query": 1, "pack": pack}
    return hopper_launch(call, limits, **options) or hopper_fp8_launch(call, limits, **options)


def _columns(found: Any, batch: Batch) -> dict[str, Column]:
    specs: Any = paged_call(batch).map(array_spec)
    columns = {name: in_graph(functools.partial(_run, plan)) for name, plan in plans(specs).items()}
    if found is not None:
        columns["FA3"] = in_graph(lambda batch: fa3(found, batch))
    return columns


def _run(plan: OperationPlan, batch: Batch) -> Callable[[], Any]:
    arrays = paged_call(batch).arrays()
    return lambda: run_operation(plan, arrays, {"out": batch.out})


BENCHMARK = Benchmark("chunks", __doc__, run, draw=draw_fractions)
