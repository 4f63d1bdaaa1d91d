"""The report of a benchmark: rows as one aligned table, as JSON, and as a picture of kernel times."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jattn.table import aligned

#: The names of this project's columns start with it.
OURS = "jattn"
#: The metadata of a row's field that is in JSON and not in the table.
HIDDEN = {"hidden": True}
_PACKAGES = ("torch", "triton", "jax")


@dataclass(frozen=True, slots=True)
class Row:
    """Kernel times of one shape.

    Attributes:
        bound_us: microseconds at the device's ceiling (bytes at copy speed, or operations at matmul speed).
        us: microseconds by implementation; NaN if it failed.
        unit: "us", or "TFLOP/s" to show rates of `operations` instead.
    """

    label: str
    bound_us: float
    us: dict[str, float]
    unit: str = "us"
    operations: float = 0.0

    def shown(self, name: str) -> float:
        """Returns the number of an implementation in `unit`; NaN if there is none."""
        value = self.us.get(name, math.nan)
        return self.operations / value / 1e6 if self.unit == "TFLOP/s" else value


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The result of a benchmark.

    Attributes:
        name: the benchmark and its options.
        versions: versions of the packages that matter.
        copy_bytes_per_second: the copy ceiling, measured in the same run; None if the rows have no ceiling.
        matmul_flops: the bfloat16 matrix product ceiling, measured in the same run, or None.
        rows: `Row` or other dataclasses; see `cells`.
        notes: failures that left a cell empty, and remarks on the run.
        values: single numbers that belong to no row.
        summary: sentences below the table.
    """

    name: str
    device: str
    versions: dict[str, str]
    copy_bytes_per_second: float | None
    matmul_flops: float | None
    rows: tuple[Any, ...]
    notes: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    summary: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The implementations of all rows, in order of first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.us))

    def ratio(self, peer: str, ours: str = OURS) -> float:
        """Returns the geometric mean of the peer's time over ours, over the rows that have both; NaN without one."""
        ratios = [row.us.get(peer, math.nan) / row.us.get(ours, math.nan) for row in self.rows]
        ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
        return statistics.geometric_mean(ratios) if ratios else math.nan

    def comparisons(self, peers: Iterable[str], ours: Callable[[str], str] = lambda _: OURS) -> list[str]:
        """Returns a sentence for each peer that shares a row with the column that `ours` returns; see `ratio`."""
        return [
            f"{peer} takes {ratio:.2f} x the time of {ours(peer)} (geometric mean)"
            for peer in peers
            if math.isfinite(ratio := self.ratio(peer, ours(peer)))
        ]

    def table(self) -> str:
        """Returns the report as text: a title, the rows, values, notes and the summary."""
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        if self.copy_bytes_per_second is not None and self.matmul_flops is not None:
            copy, matmul = self.copy_bytes_per_second / 1e12, self.matmul_flops / 1e12
            versions = f"copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s; {versions}"
        lines = [f"{self.name} on {self.device}: {versions}", *_table([cells(row) for row in self.rows])]
        lines += [f"{key}: {value:.6g}" for key, value in self.values.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *self.summary])

    def record(self) -> dict[str, Any]:
        """Returns the report in JSON's types: "inf" for an infinite number, None for NaN."""
        return _finite(asdict(self))


def cells(row: Any) -> dict[str, str]:
    """Returns the text of a row by column.

    The columns of a `Row` are its implementations, each number with its fraction of the ceiling. Those of another
    dataclass are its fields, without those whose metadata is `HIDDEN`.
    """
    if not isinstance(row, Row):
        shown = [each.name for each in fields(row) if each.metadata != HIDDEN]
        return {name.replace("_", " "): _text(getattr(row, name)) for name in shown}
    found = {"shape": row.label, "bound us": f"{row.bound_us:.1f}"}
    for name, value in row.us.items():
        found[name] = f"{row.shown(name):.1f} ({row.bound_us / value:.2f})" if math.isfinite(value) else "-"
    return found


def package_versions() -> dict[str, str]:
    """Returns the versions of torch, triton and jax, if they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        # Four digits, without an exponent.
        return f"{value:.4f}" if 0 < abs(value) < 1 else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return "/".join(map(_text, value.values()))
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return "" if value is None else str(value)


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return []
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [[row.get(head, "-") for head in heads] for row in rows]
    # Numbers are flush right, words flush left.
    right = [i for i in range(1, len(heads)) if not any(letter.isalpha() for line in lines for letter in line[i])]
    return aligned([heads, *lines], right=right)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
