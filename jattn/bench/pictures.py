"""Pictures of reports: kernel times as fractions of the device's ceiling, and latencies of a server."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jattn.bench.report import BenchReport
from torch_core.base.errors import Unsupported

_PERCENTILES = ("p50", "p99")


def check_matplotlib() -> None:
    """Raises Unsupported if matplotlib, which draws the pictures, is not installed."""
    _figure()


def draw_fractions(report: BenchReport, path: Path) -> None:
    """Writes a PNG: for each row of kernel times, every implementation's fraction of the device's ceiling."""
    figure = _figure(figsize=(max(6, 1.2 * len(report.rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(report.columns))
    for index, name in enumerate(report.columns):
        fractions = [row.bound_us / row.us.get(name, math.nan) for row in report.rows]
        positions = [place + index * width for place in range(len(report.rows))]
        # A row that failed has no bar.
        axes.bar(positions, [each if math.isfinite(each) else 0.0 for each in fractions], width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(report.rows))], [r.label for r in report.rows])
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("fraction of the device's ceiling")
    axes.set_title(f"{report.name}, {report.device}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_loads(report: BenchReport, path: Path) -> None:
    """Writes a PNG of `jattn.bench.arrivals.ServeRow`s: latencies against throughput, and the use of the pool."""
    figure = _figure(figsize=(13, 4.2), layout="constrained")
    first, each, pool = figure.subplots(1, 3)
    _draw_latency(first, report.rows, "ttft_ms", "time to first token, ms")
    _draw_latency(each, report.rows, "tpot_ms", "time per output token, ms")
    watched = [row for row in report.rows if row.pool_usage]
    for row in watched:
        pool.plot(*zip(*row.pool_usage, strict=True), label=row.load)
    pool.set_xlabel("seconds since the first arrival")
    pool.set_ylabel("share of the pool's blocks in use")
    if watched:
        pool.legend(title="load", fontsize="small")
    figure.savefig(path, dpi=150, format="png")


def _figure(**options: Any) -> Any:
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise Unsupported("a picture needs matplotlib: pip install 'jattn[plot]', or leave --png out.") from None
    return figure_class(**options)


def _draw_latency(axes: Any, rows: Sequence[Any], name: str, label: str) -> None:
    for percentile in _PERCENTILES:
        points = [(row.output_tokens_per_second, getattr(row, name)[percentile]) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", label=percentile)
    for row in rows:
        place = (row.output_tokens_per_second, getattr(row, name)[_PERCENTILES[-1]])
        axes.annotate(row.load, place, textcoords="offset points", xytext=(4, 4), fontsize="small")
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_xlabel("output tokens per second, at each load")
    axes.legend(fontsize="small")
