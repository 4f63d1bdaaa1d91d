"""Reports by the `logging` module: events with fields, and steps whose results do not come."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

LOGGER = logging.getLogger("jattn")


def event(level: int, name: str, **fields: Any) -> None:
    """Logs an event: a line of text, and `record.event` and each field as attributes of the record.

    Args:
        level: level of the `logging` module.
        name: name of the event.
        **fields: strings, numbers, None, and lists of them.
    """
    if LOGGER.isEnabledFor(level):
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        LOGGER.log(level, "%s: %s", name, text, extra={"event": name, **fields}, stacklevel=2)


class Compiling(NamedTuple):
    """The compiling of programs.

    Attributes:
        seconds: time that it took so far, that of the present program included.
        program: the present program; None if none is being compiled.
        present_seconds: time that it took so far.
    """

    seconds: float = 0.0
    program: str | None = None
    present_seconds: float = 0.0


# Number of checks within a step's time limit.
_LOOKS = 4


class Watchdog:
    """Notes when steps are dispatched and when they come back; a thread of its own looks for those that do not.

    It ends nothing: callers that wait for the step keep waiting. Each step is reported once, by a warning of the logger
    "jattn", and again when it came after all. While a program is compiled, no step can be read: this time does not
    count, and a program that takes longer than the limit is reported itself, as "compiling". The thread starts with the
    first step and ends with this object.

    Args:
        seconds: time limit of a step from its dispatch on; None for no watch and no thread.
        describe: returns fields of a step for the report.
        compiling: returns what is compiled.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float | None,
        describe: Callable[[Any], dict[str, Any]],
        compiling: Callable[[], Compiling] = Compiling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._describe, self._compiling, self._clock = seconds, describe, compiling, clock
        self._out: dict[int, tuple[float, Any]] = {}
        self._reported: set[int] = set()
        self._reported_program: str | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def dispatched(self, step: Any) -> None:
        """Says that a step is on the device."""
        if self._seconds is None:
            return
        self._out[step.committed.step_id] = (self._now(), step)
        if self._thread is None:
            # It must not keep the watched object alive.
            weakref.finalize(self, self._end.set)
            arguments = (weakref.ref(self), self._end, self._seconds / _LOOKS)
            self._thread = threading.Thread(target=_look, args=arguments, name="jattn-watchdog", daemon=True)
            self._thread.start()

    def came(self, step: Any) -> None:
        """Says that a step's results are here."""
        started, _ = self._out.pop(step.committed.step_id, (0.0, step))
        if step.committed.step_id in self._reported:
            self._reported.discard(step.committed.step_id)
            age = self._now() - started
            event(logging.WARNING, "stuck_step_came", step_id=step.committed.step_id, age_seconds=age)

    def forget(self) -> None:
        """Drops the steps in flight: no caller waits for them any more."""
        self._out, self._reported = {}, set()

    def check(self) -> None:
        """Reports the steps that are out for too long, and a program that is compiled for long, once each."""
        if self._seconds is None:
            return
        _, program, seconds = self._compiling()
        if program is None or program != self._reported_program:
            self._reported_program = None
        if program is not None and seconds >= self._seconds and self._reported_program is None:
            self._reported_program = program
            event(logging.WARNING, "compiling", program=program, age_seconds=seconds)
        now = self._now()
        for step_id, (started, step) in list(self._out.items()):
            if now - started >= self._seconds and step_id not in self._reported:
                self._reported.add(step_id)
                event(
                    logging.WARNING,
                    "stuck_step",
                    step_id=step_id,
                    age_seconds=now - started,
                    num_seqs=len(step.rows),
                    num_tokens=step.num_tokens,
                    request_ids=[row.request.request_id for row in step.rows],
                    **self._describe(step),
                )

    def _now(self) -> float:
        """Returns the time without that of compiling."""
        return self._clock() - self._compiling().seconds


def _look(watchdog: weakref.ref[Watchdog], end: threading.Event, seconds: float) -> None:
    while not end.wait(seconds):
        found = watchdog()
        if found is None:
            return
        found.check()
        del found
