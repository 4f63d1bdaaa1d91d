"""The process itself: reads a task, sets the bounds, runs the task's function, writes the answer."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from jattn.llm.workers.pool import HEADER, LENGTH, NO_MEMORY, REFUSAL, RESULT


def serve() -> None:
    """Answers the owner's messages until its end of the pipe is closed."""
    # An interrupt at a terminal reaches all processes of a group; the owner decides about this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # A library that prints must not write between the answers.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    while len(header := owner.read(LENGTH.size)) == LENGTH.size:
        kind, payload = _answer(owner.read(*LENGTH.unpack(header)))
        answers.write(HEADER.pack(kind, len(payload)) + payload)
        answers.flush()


def _answer(message: bytes) -> tuple[int, bytes]:
    module, function, seconds, memory_bytes, most_bytes, arguments = json.loads(message)
    del message
    run = getattr(importlib.import_module(f"jattn.llm.workers.{module}"), function)
    try:
        with _bounds(seconds, memory_bytes):
            payload = run(*arguments)
    except MemoryError:
        return NO_MEMORY, b""
    except BaseException as error:
        # A template is a program and raises anything; where Rust panics, pyo3 raises a class that is no Exception.
        return REFUSAL, bytes(str(error), "utf-8", "replace")
    if len(payload) > most_bytes:
        return NO_MEMORY, b""
    return RESULT, payload


@contextlib.contextmanager
def _bounds(seconds: float, memory_bytes: int) -> Iterator[None]:
    """Bounds the processor time and the memory of the body, where the system can."""
    with contextlib.ExitStack() as stack:
        if hasattr(signal, "setitimer"):
            # The signal ends the process, also inside a library and if the owner is gone.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            stack.callback(signal.setitimer, signal.ITIMER_PROF, 0)
        if (used := _data_bytes()) is not None:
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, most))
            stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (most, most))
        yield


def _data_bytes() -> int | None:
    """Returns the memory that RLIMIT_DATA counts; None where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGESIZE")
    return None


if __name__ == "__main__":
    serve()
