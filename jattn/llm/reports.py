"""Reports by the `logging` module: events with fields, and steps whose results do not come."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

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


# Number of checks within a step's time limit.
_LOOKS = 4


class Watchdog:
    """Notes when steps are dispatched and when they come back; a thread of its own looks for those that do not.

    It ends nothing: callers that wait for the step keep waiting. Each step is reported once, by a warning of the logger
    "jattn", and again when it came after all. The thread starts with the first step and ends with this object.

    Args:
        seconds: time limit of a step from its dispatch on; None for no watch and no thread.
        describe: returns fields of a step for the report.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float | None,
        describe: Callable[[Any], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._describe, self._clock = seconds, describe, clock
        self._out: dict[int, tuple[float, Any]] = {}
        self._reported: set[int] = set()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def dispatched(self, step: Any) -> None:
        """Says that a step is on the device."""
        if self._seconds is None:
            return
        self._out[step.committed.step_id] = (self._clock(), step)
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
            age = self._clock() - started
            event(logging.WARNING, "stuck_step_came", step_id=step.committed.step_id, age_seconds=age)

    def forget(self) -> None:
        """Drops the steps in flight: no caller waits for them any more."""
        self._out, self._reported = {}, set()

    def check(self) -> None:
        """Reports the steps that are out for too long and were not reported yet."""
        now = self._clock()
        for step_id, (started, step) in list(self._out.items()):
            if self._seconds is not None and now - started >= self._seconds and step_id not in self._reported:
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


def _look(watchdog: weakref.ref[Watchdog], end: threading.Event, seconds: float) -> None:
    while not end.wait(seconds):
        found = watchdog()
        if found is None:
            return
        found.check()
        del found
