"""Times by kernel, of a trace without a device and of events that are given."""

from __future__ import annotations

from pathlib import Path

from jattn.bench.measure import kernel_times, profiled


def test_overlapping_kernels_are_busy_once_and_the_longest_comes_first() -> None:
    times = kernel_times([("short", 0, 1_000), ("long", 500, 3_500), ("short", 5_500, 6_500)])

    assert (times.span, times.busy) == (6.5, 4.5)
    assert times.rows == (("long", 1, 3.0), ("short", 2, 2.0))
    assert str(times).splitlines()[0] == "  device 0.01 ms, idle 30.77%"


def test_a_trace_without_a_device_is_said_to_be_one(tmp_path: Path) -> None:
    assert str(profiled(tmp_path, lambda: None)).startswith("  no kernels of a device in")
