"""The processes as their owner sees them: started when first needed, ended at a bound, at `close` and at the exit.

A template, a schema or a long text can take any time and any memory inside a library that no exception can leave and
that may hold the interpreter's lock. Only a process ends such work for certain.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from torch_core.base.errors import InvalidInput, Overloaded

#: Before each message its length; before each answer also its kind.
LENGTH, HEADER = struct.Struct("<Q"), struct.Struct("<BQ")
#: Kinds of answers.
RESULT, REFUSAL, NO_MEMORY = range(3)
_SIZE = 2
_WAIT_SECONDS = 10.0
# A busy machine gives a process a part of a core. Without limits of the system, this alone ends the work.
_CLOCK_PER_SECOND = 8.0
_MOST_RESULT_BYTES = 1 << 26
_MOST_KEPT, _KEPT_BYTES = 4, 2 << 30
_PROGRAM = "import sys; sys.path[:] = {path!r}; from jattn.llm.workers.child import serve; serve()"


class Refused(Exception):
    """A task's function raised an exception, whose text this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function of this room that runs in a process, and its bounds.

    Attributes:
        module: file of the function. Tasks of one file share processes, so that those of others need not wait.
        function: name of the function; it takes JSON values and returns bytes. Its exceptions are refusals.
        argument: the argument that an error names.
        subject: subject of the errors' sentences, such as "the chat template".
        fix: advice after a bound that was met.
        seconds: most processor time.
        memory_bytes: most memory beyond that of the idle process.
    """

    module: str
    function: str
    argument: str
    subject: str
    fix: str
    seconds: float
    memory_bytes: int

    def run(self, *arguments: Any, needs: tuple[str, Callable[[], str]] | None = None) -> bytes:
        """Runs the task in a process and returns its result.

        Args:
            *arguments: values that JSON can spell; mappings and sequences of any class pass as objects and lists.
            needs: a name, and a function that returns a text. The process gets the text once, by the function `keep`
                of the task's file, and keeps it by its name.

        Raises:
            Refused: the function raised an exception.
            InvalidInput: the task met a bound, or its arguments are no JSON values.
            Overloaded: no process became free in time.
        """
        lane = _lanes_of(os.getpid())[self.module]
        message = _encoded(self, self.function, arguments)
        with lane.process() as process:
            if needs is not None and needs[0] not in process.kept:
                kept = [*process.kept, needs[0]][-_MOST_KEPT:]
                process.ask(replace(self, memory_bytes=_KEPT_BYTES), _encoded(self, "keep", (kept, needs[1]())))
                process.kept = kept
            return process.ask(self, message)


def end_idle_processes() -> None:
    """Ends the processes that have no work; the next task starts one again."""
    for lane in _lanes_of(os.getpid()).values():
        lane.end_idle()


@functools.cache
def _lanes_of(_: int) -> Mapping[str, _Lane]:
    """Returns the lanes of a process, by the file of their tasks; a fork must not use those of its parent."""
    return {name: _Lane() for name in ("grammars", "templates", "tokens")}


class _Lane:
    """Processes for the tasks of one file, and their callers in order."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_SIZE)
        # The last one first: a second one starts only while the first one works.
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()

    @contextlib.contextmanager
    def process(self) -> Any:
        if not self._free.acquire(timeout=_WAIT_SECONDS):
            raise Overloaded(f"{_SIZE} processes are busy, and none became free in {_WAIT_SECONDS:.0f} s; try again.")
        try:
            process = None
            while process is None or not process.alive:
                try:
                    process = self._idle.get_nowait()
                except queue.Empty:
                    process = _Process()
            try:
                yield process
            except Refused:
                raise
            except BaseException:
                # After a bound, an interrupt or a fault it may be in any state.
                process.end()
                raise
            finally:
                if process.alive:
                    self._idle.put(process)
        finally:
            self._free.release()

    def end_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()


class _Process:
    """One process and its pipes; one caller at a time."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        program = _PROGRAM.format(path=[os.path.abspath(each) for each in sys.path])
        # The program is a new interpreter, not a fork: JAX has threads. It does not import the caller's script either.
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._answers: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), name="jattn-worker", daemon=True
        ).start()
        self.end: Callable[[], object] = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: Task, message: bytes) -> bytes:
        """Sends a message and waits for the answer, as long as the task may take."""
        deadline = time.monotonic() + task.seconds * _CLOCK_PER_SECOND
        pipe: Any = self._process.stdin
        try:
            # A pipe takes a part at a time; the process reads all before it works.
            pipe.write(LENGTH.pack(len(message)) + message)
            pipe.flush()
            answer = self._answers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise _too_slow(task) from None
        except OSError:
            answer = None
        if answer is None:
            raise self._fault(task)
        kind, payload = answer
        if kind == REFUSAL:
            raise Refused(payload.decode())
        if kind == NO_MEMORY:
            raise _too_large(task)
        return payload

    def _fault(self, task: Task) -> Exception:
        """Returns the error of a process that ended without an answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self._process.kill()
        code = self._process.wait()
        if code == 1:
            return RuntimeError(f"no process starts for {task.subject}; `python -m jattn.llm.workers.child` says why.")
        return _too_slow(task) if code == -getattr(signal, "SIGPROF", 0) else _too_large(task)


def _encoded(task: Task, function: str, arguments: Sequence[Any]) -> bytes:
    try:
        given = [task.module, function, task.seconds, task.memory_bytes, _MOST_RESULT_BYTES, arguments]
        return json.dumps(given, default=_as_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{task.subject} takes values that JSON can spell: {error}."
        raise InvalidInput(text, argument=task.argument) from None


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is none")


def _read(pipe: BinaryIO, answers: queue.SimpleQueue[tuple[int, bytes] | None]) -> None:
    """Passes on a process's answers until its end."""
    with contextlib.suppress(OSError, ValueError):
        while len(header := pipe.read(HEADER.size)) == HEADER.size:
            kind, length = HEADER.unpack(header)
            if length > _MOST_RESULT_BYTES:
                break
            answers.put((kind, pipe.read(length)))
    answers.put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # A full pipe has no reader any more.
        with contextlib.suppress(OSError, AttributeError):
            pipe.close()  # pyright: ignore[reportOptionalMemberAccess]


def _too_slow(task: Task) -> InvalidInput:
    text = f"{task.subject} takes more than {task.seconds:g} s of processor time; {task.fix}."
    return InvalidInput(text, argument=task.argument)


def _too_large(task: Task) -> InvalidInput:
    memory, result = task.memory_bytes >> 20, _MOST_RESULT_BYTES >> 20
    text = f"{task.subject} takes more than {memory} MiB of memory, or {result} of them for its result; {task.fix}."
    return InvalidInput(text, argument=task.argument)
