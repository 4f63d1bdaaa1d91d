"""The picture of `jattn bench serve`: throughput against latency over the rates, and the pool's use over time."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch_core.base.errors import Unsupported

__all__ = ["Measured", "check_matplotlib", "save_picture"]

_SHOWN = ("p50", "p99")


class Measured(Protocol):
    """What of a rate is drawn; see `jattn.bench.serve.ServeRow`."""

    @property
    def rate(self) -> float: ...
    @property
    def output_tokens_per_second(self) -> float: ...
    @property
    def ttft_ms(self) -> Mapping[str, float]: ...
    @property
    def tpot_ms(self) -> Mapping[str, float]: ...
    @property
    def pool_usage(self) -> Sequence[tuple[float, float]]: ...


def save_picture(rows: Sequence[Measured], path: str | os.PathLike[str]) -> None:
    """Writes a PNG: time to the first token and time per token against throughput, and what of the pool was in use.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    check_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(13, 4.2), layout="constrained")
    first, each, pool = figure.subplots(1, 3)
    for axes, name in ((first, "ttft_ms"), (each, "tpot_ms")):
        _draw_latency(axes, rows, name)
    first.set_ylabel("time to first token, ms")
    each.set_ylabel("time per output token, ms")
    for row in rows:
        if row.pool_usage:
            pool.plot(*zip(*row.pool_usage, strict=True), label=_rate(row))
    pool.set_xlabel("seconds since the first arrival")
    pool.set_ylabel("share of the pool's blocks in use")
    if any(row.pool_usage for row in rows):
        pool.legend(title="requests a second", fontsize="small")
    figure.savefig(path, dpi=150, format="png")


def check_matplotlib() -> None:
    """Refuses a picture before anything is measured for it.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise Unsupported("a picture needs matplotlib: pip install 'jattn[plot]', or leave --png out.") from None


def _draw_latency(axes: Any, rows: Sequence[Measured], name: str) -> None:
    for percentile in _SHOWN:
        points = [(row.output_tokens_per_second, getattr(row, name)[percentile]) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", label=percentile)
    for row in rows:
        axes.annotate(
            _rate(row),
            (row.output_tokens_per_second, getattr(row, name)[_SHOWN[-1]]),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize="small",
        )
    axes.set_yscale("log")
    axes.set_xlabel("output tokens a second, at each rate of requests")
    axes.legend(fontsize="small")


def _rate(row: Measured) -> str:
    return f"{row.rate:g}"
