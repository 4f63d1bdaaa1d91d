"""The session of a CUDA benchmark: the ceilings of the device, measured first, and the rows."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from jattn.bench import measure, peers
from jattn.bench.report import OURS, BenchReport, Row, package_versions

#: Microseconds of one implementation's call on batches of one shape, each in memory of its own.
Column: TypeAlias = Callable[[list[Any]], float]


class Session:
    """Times columns row by row and makes the report."""

    def __init__(self, name: str, peers_directory: Path | None = None) -> None:
        measure.require_cuda(name)
        self.peers = peers.load_peers(peers_directory)
        # Bytes per second of a large copy, and operations per second of a large bfloat16 matrix product.
        self.copy = measure.copy_bytes_per_second()
        self.matmul = measure.matmul_flops()
        self.rows: list[Row] = []
        self._notes: list[str] = []

    def add(
        self,
        row: Row,
        columns: Mapping[str, Column],
        batches: list[Any],
        *,
        required: Collection[str] = (),
        place: str | None = None,
    ) -> Row:
        """Times every column, prints each time on stderr at once, and returns the row with its times.

        Args:
            row: the row without times.
            columns: by name.
            batches: the columns' argument; emptied at the end, so that its memory is free for the next row.
            required: columns whose failure is raised. The failure of another one becomes a note.
            place: the row's name in notes; its label if None.
        """
        times: dict[str, float] = {}
        for name, timed in columns.items():
            measure.rest()
            try:
                times[name] = timed(batches)
            except Exception as error:
                if name in required:
                    raise
                times[name] = math.nan
                self._notes.append(f"{name} at {place or row.label}: {str(error).splitlines()[0][:160]}")
            print(f"{row.label}, {name}: {times[name]:.1f} us", file=sys.stderr, flush=True)
        batches.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self.rows.append(replace(row, us=times))
        return self.rows[-1]

    def rate_row(self, label: str, operations: float) -> Row:
        """Returns a row, without times, that shows rates: its ceiling is the matrix product's."""
        return Row(label, operations / self.matmul * 1e6, {}, "TFLOP/s", operations)

    def report(
        self,
        name: str,
        *,
        values: dict[str, float] | None = None,
        compared: Callable[[str], str | None] = lambda name: None,
    ) -> BenchReport:
        """Returns the report of all rows; `compared` returns the column that a column is compared with, or None."""
        report = BenchReport(
            name=name,
            device=measure.device_name(),
            versions=package_versions(),
            copy_bytes_per_second=self.copy,
            matmul_flops=self.matmul,
            rows=tuple(self.rows),
            notes=tuple(self._notes),
            values=values or {},
        )
        pairs = {name: ours for name in report.columns if (ours := compared(name))}
        return replace(report, summary=tuple(report.comparisons(pairs, pairs.__getitem__)))


def with_ours(column: str) -> str | None:
    """Returns the column that each other one is compared with: ours."""
    return None if column == OURS else OURS


def in_graph(call: Callable[[Any], Callable[[], Any]]) -> Column:
    """Returns the column of a call, made on each batch, under CUDA graph replay; see `measure.graph_us`."""
    return lambda batches: measure.graph_us([call(batch) for batch in batches])
