"""Where the time of a device goes, kernel by kernel, from a trace of JAX's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from jattn.table import aligned

_SHOWN = 24


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times of a device's kernels in a trace, in microseconds."""

    #: From the first kernel's start to the last one's end.
    span: float
    #: Time of the span in which a kernel ran.
    busy: float
    #: For each kernel its name, number of runs and total time; the longest first.
    rows: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        idle = 1 - self.busy / self.span if self.span else 0.0
        lines = [
            (f"{total:.1f} us", f"{count} x", f"{total / count:.2f}", name[:100])
            for name, count, total in self.rows[:_SHOWN]
        ]
        return "\n".join(
            [f"  device {self.span / 1e3:.2f} ms, idle {idle:.2%}", *(f"    {line}" for line in aligned(lines))]
        )


def profiled(folder: Path, call: Callable[[], Any]) -> KernelTimes | str:
    """Traces a call into a folder and returns the times of its kernels; says so if there is no device to look at."""
    with jax.profiler.trace(str(folder)):
        call()
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = ProfileData.from_file(str(found[-1])).planes if found else ()
    for plane in planes:
        if plane.name.startswith("/device:GPU:0"):
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            return kernel_times((event.name, event.start_ns, event.end_ns) for line in lines for event in line.events)
    return f"  no kernels of a device in {folder}"


def kernel_times(events: Iterable[tuple[str, float, float]]) -> KernelTimes:
    """Sums events, (name, start, end) in nanoseconds, that may overlap.

    Example:
        >>> kernel_times([("a", 0, 2000), ("b", 1000, 3000), ("a", 5000, 6000)])
        KernelTimes(span=6.0, busy=4.0, rows=(('a', 2, 3.0), ('b', 1, 2.0)))
    """
    ordered = sorted(events, key=lambda event: event[1])
    totals: dict[str, tuple[int, float]] = {}
    busy, reached = 0.0, ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + (end - start) / 1e3
        busy += max(0.0, end - max(start, reached)) / 1e3
        reached = max(reached, end)
    span = (reached - ordered[0][1]) / 1e3 if ordered else 0.0
    rows = sorted(((name, *each) for name, each in totals.items()), key=lambda row: -row[2])
    return KernelTimes(span, busy, tuple(rows))
