"""A CUDA benchmark under way: the ceilings of the device, measured first, and the rows found so far."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from jattn.bench import measure, peers
from jattn.bench.report import BenchReport, Row

__all__ = ["Column", "Session", "in_graph"]

#: Microseconds of one implementation's call on batches of one shape, each in memory of its own.
Column: TypeAlias = Callable[[list[Any]], float]


class Session:
    """Times columns row by row and makes the report.

    Args:
        name: of the benchmark, for the error.
        peers_directory: see `jattn.bench.peers.load_peers`, whose result is `peers`.

    Attributes:
        copy: bytes per second of a large copy.
        matmul: operations per second of a large bfloat16 matrix product.

    Raises:
        InvalidInput: the folder of the peers has no such module.
        Unsupported: torch or JAX has no CUDA device.
    """

    def __init__(self, name: str, peers_directory: Path | None = None) -> None:
        measure.require_cuda(name)
        self.peers = peers.load_peers(peers_directory)
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
        """Times every column and returns the row with its times.

        A column that fails is a note under the name of `place` (the row's label when None), unless it is `required`.
        Each time stands on stderr at once: whoever runs out of time has those before.
        `batches`, what the columns take, is emptied, so that their memory is free for the next row.
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

    def report(self, name: str, *, values: dict[str, float] | None = None) -> BenchReport:
        """Returns the report of all rows; see `BenchReport` for the arguments."""
        return BenchReport(
            name=name,
            device=measure.device_name(),
            versions={package: importlib.metadata.version(package) for package in ("torch", "triton", "jax")},
            copy_bytes_per_second=self.copy,
            matmul_flops=self.matmul,
            rows=tuple(self.rows),
            notes=tuple(self._notes),
            values=values or {},
        )


def in_graph(call: Callable[[Any], Callable[[], Any]]) -> Column:
    """Returns the column of a call, made on each batch, under CUDA graph replay; see `measure.graph_us`."""
    return lambda batches: measure.graph_us([call(batch) for batch in batches])
