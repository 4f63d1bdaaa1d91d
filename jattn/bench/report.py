"""What a CUDA benchmark found: rows with one number for each implementation, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jattn.table import aligned
from torch_core.base.errors import InvalidInput, Unsupported

__all__ = ["OURS", "BenchReport", "Row", "check_places"]

#: Names of the columns that are this project's start with it.
OURS = "jattn"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured shape.

    Attributes:
        label: the shape in words.
        bound_us: microseconds that the device's ceiling allows (bytes at copy speed, or operations at matmul speed).
        us: microseconds by implementation; NaN where it failed.
        unit: "us", or "TFLOP/s" to show rates instead.
        operations: floating point operations, for the rates.
    """

    label: str
    bound_us: float
    us: dict[str, float]
    unit: str = "us"
    operations: float = 0.0

    def shown(self, name: str) -> float:
        """The number to show for an implementation, in `unit`."""
        value = self.us.get(name, math.nan)
        return self.operations / value / 1e6 if self.unit == "TFLOP/s" else value


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A benchmark's result.

    Attributes:
        name: the benchmark.
        device: the GPU's name.
        versions: of torch, triton and jax.
        copy_bytes_per_second: the copy ceiling, measured in the same run.
        matmul_flops: the bfloat16 matrix product ceiling, measured in the same run.
        rows: the measurements.
        notes: what could not be measured, and why.
        values: single numbers that belong to no row.
    """

    name: str
    device: str
    versions: dict[str, str]
    copy_bytes_per_second: float
    matmul_flops: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every implementation that a row has, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.us))

    @property
    def peers(self) -> tuple[str, ...]:
        """The columns that are not ours."""
        return tuple(name for name in self.columns if not name.startswith(OURS))

    def ratio(self, peer: str, ours: str = OURS) -> float:
        """Geometric mean over the rows that have both of the peer's time over ours; NaN without such a row."""
        logs = [
            math.log(row.us[peer] / row.us[ours])
            for row in self.rows
            if math.isfinite(row.us.get(peer, math.nan)) and math.isfinite(row.us.get(ours, math.nan))
        ]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    def comparisons(self, peers: Iterable[str], ours: Callable[[str], str] = lambda _: OURS) -> list[str]:
        """A sentence for each peer that was measured beside ours: `ratio`.

        Args:
            peers: columns.
            ours: which of our columns a peer stands beside.
        """
        return [
            f"{peer} takes {ratio:.2f} x the time of {ours(peer)} (geometric mean)"
            for peer in peers
            if math.isfinite(ratio := self.ratio(peer, ours(peer)))
        ]

    def table(self) -> str:
        """The rows as text, each number with the fraction of the ceiling that it reaches."""
        lines = [
            f"{self.name} on {self.device}: copy {self.copy_bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
            f"{self.matmul_flops / 1e12:.0f} TFLOP/s; " + ", ".join(f"{k} {v}" for k, v in self.versions.items())
        ]
        if self.rows:
            cells = [
                (row.label, f"{row.bound_us:.1f}", *(_cell(row, name) for name in self.columns)) for row in self.rows
            ]
            lines += aligned([("shape", "bound us", *self.columns), *cells], right=range(1, len(cells[0])))
        lines += [f"{key}: {value:.6g}" for key, value in self.values.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def write(self, *, json_path: Path | None = None, png_path: Path | None = None) -> None:
        """Writes the report as JSON and as a picture.

        Raises:
            Unsupported: a picture is wanted and matplotlib is missing.
        """
        if json_path is not None:
            json_path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        if png_path is not None:
            _plot(self, png_path)


def _cell(row: Row, name: str) -> str:
    value = row.us.get(name, math.nan)
    if not math.isfinite(value):
        return "-"
    return f"{row.shown(name):.1f} ({row.bound_us / value:.2f})"


def check_places(*, json_path: Path | None = None, png_path: Path | None = None) -> None:
    """Checks that a report can be written there, before minutes are measured.

    Raises:
        InvalidInput: no such folder, or a folder in the place of the file.
        Unsupported: a picture is wanted and matplotlib is missing.
    """
    for option, path in (("--json", json_path), ("--png", png_path)):
        if path is not None and not path.parent.is_dir():
            raise InvalidInput(f"{option} {path}: there is no folder {path.parent}; make it, or name another.")
        if path is not None and path.is_dir():
            raise InvalidInput(f"{option} {path}: this is a folder; name a file in it.")
    if png_path is not None:
        _figure()


def _figure(**options: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("a picture needs matplotlib: pip install 'jattn[plot]', or leave --png out.") from error
    return Figure(**options)


def _plot(report: BenchReport, path: Path) -> None:
    figure = _figure(figsize=(max(6, 1.2 * len(report.rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(report.columns))
    for index, name in enumerate(report.columns):
        # A row that failed has no bar.
        heights = [row.bound_us / row.us.get(name, math.nan) for row in report.rows]
        positions = [place + index * width for place in range(len(report.rows))]
        axes.bar(positions, np.nan_to_num(heights), width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(report.rows))], [r.label for r in report.rows])
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("fraction of the device's ceiling")
    axes.set_title(f"{report.name}, {report.device}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
