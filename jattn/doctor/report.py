"""collect: checks every part of the machine and returns the results, failures included, as lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jattn.doctor import machine, trials
from jattn.extras import missing_extra
from jattn.table import aligned
from torch_core.base.errors import JattnError


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: the result for a part, in its section.

    `works` is False when the part is broken; one that is merely absent, or cannot run on this machine, is not.
    """

    section: str
    name: str
    text: str
    works: bool = True


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything that was found, in order; `str(report)` is the text to show."""

    checks: tuple[Check, ...]

    @property
    def broken(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.works)

    def __str__(self) -> str:
        rows = [("", check.name, ("" if check.works else "BROKEN: ") + check.text) for check in self.checks]
        lines: list[str] = []
        shown = iter(aligned(rows))
        for section, checks in itertools.groupby(self.checks, lambda check: check.section):
            lines += [section, *(next(shown) for _ in checks), ""]
        return "\n".join([*lines, f"{len(self.broken)} broken: see above" if self.broken else "all parts work"])


#: A part's name and its check, which returns the text or raises the fault.
Part = tuple[str, Callable[[], str]]


def collect() -> DoctorReport:
    """Looks at every part, running small things where only that tells, and never raises for one that is broken.

    On CUDA it allocates a few kilobytes on each side, which makes torch open the device.

    Example:
        >>> report = collect()
        >>> report.checks[0].section, report.checks[0].name
        ('versions', 'python')
    """
    sections: tuple[tuple[str, Callable[[], Iterable[Part]]], ...] = (
        ("versions", machine.versions),
        ("devices", machine.devices),
        ("implementations", trials.implementations),
        ("bits", trials.bits),
        ("shared memory", trials.shared_memory),
        ("memory", machine.memory),
        ("environment", machine.environment),
        ("threads", machine.threads),
        ("compile caches", machine.compile_caches),
    )
    return DoctorReport(tuple(check for section, parts in sections for check in look_at(section, parts)))


def look_at(section: str, parts: Callable[[], Iterable[Part]]) -> Iterator[Check]:
    """Yields one check for each part, and one for the section itself if its parts cannot even be listed."""
    # Any exception of a broken installation belongs in the report.
    try:
        for name, look in parts():
            try:
                yield Check(section, name, look())
            except Exception as error:
                absent = missing_extra(error)
                yield Check(section, name, absent or _described(error), works=absent is not None)
    except Exception as error:
        yield Check(section, section, _described(error), works=False)


def _described(error: Exception) -> str:
    first_line, *_ = str(error).strip().splitlines() or [""]
    return first_line if isinstance(error, JattnError) else f"{type(error).__name__}: {first_line}"
