"""Progress reports: a bar on a terminal, or a function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress


@contextlib.contextmanager
def progress(report: Callable[[int, int, str], None] | None) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function of count, total and label: `report`, or a bar on stderr if that is None."""
    if report is not None:
        yield report
        return
    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total)
