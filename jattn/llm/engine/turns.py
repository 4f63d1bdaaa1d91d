"""One thread at a time at what several threads share, and a turn for those that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jattn.llm.engine.no_mesh import no_mesh

__all__ = ["Turns"]

# How long a thread that wants turn after turn lets another one in: a lock goes to whoever asks first after its
# release, and that is mostly the thread that released it.
_TURN_SECONDS = 5e-5
_TURNS = 5

Result = TypeVar("Result")


class Turns:
    """A lock that a thread in a loop does not keep from the others. A thread that has it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # A set, as adding to one and taking from it is one step of the interpreter; a count is two.
        self._arriving: set[int] = set()

    def run(self, action: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Runs an action as the only thread; undoes it when an interrupt keeps its result from the caller.

        No mesh of the caller's is set meanwhile. A signal's handler may run right after the lock's release, and its
        error must not take the result with it.
        """
        thread = threading.get_ident()
        self._arriving.add(thread)
        done: list[Result] = []
        try:
            with self._lock, no_mesh():
                self._arriving.discard(thread)
                done = [action()]
            return done[0]
        except BaseException:
            self._arriving.discard(thread)
            if done and undo is not None:
                with self._lock, no_mesh():
                    undo(done[0])
            raise

    def let_in(self) -> None:
        """Waits a moment while other threads want a turn; for a thread that takes one after the other."""
        for _ in range(_TURNS):
            if self._arriving:
                time.sleep(_TURN_SECONDS)
