"""The order in which the roles of programs and their copies come: a seed decides."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tests.support.emulated.barriers import Role

__all__ = ["Deadlock", "Scheduler", "Warps"]

# How often it is decided anew who stands still.
_SWITCH = 1 / 32


class Deadlock(AssertionError):
    """Warps wait for what nobody will do."""


class Scheduler:
    """Runs programs in the order in which a device starts them, with some of them at the same time.

    For stretches of time one of the roles, or the copies, stand still for as long as anything else can go on.

    Args:
        seed: of the order in which roles and copies come.
        resident: how many programs a device holds; another one starts when one has ended.
    """

    def __init__(self, seed: int, resident: int = 1) -> None:
        self._random = random.Random(seed)
        self._resident = resident
        self._warps: list[Warps] = []
        self._copies: list[Callable[[], None]] = []
        self._local = threading.local()

    @property
    def current(self) -> Warps:
        """The warps that this thread is."""
        return self._local.warps

    def run(self, programs: Iterable[tuple[str, int, Callable[[], Any]]]) -> None:
        """Runs programs of (name, warps, function), and the copies that they leave.

        Raises:
            Deadlock: all that are there wait.
        """
        left, running, late = iter(programs), list[Warps](), None
        try:
            while True:
                running = [warps for warps in running if not warps.done]
                for _, program in zip(range(self._resident - len(running)), left, strict=False):
                    running.append(self.start(*program, is_program=True))
                if not running:
                    break
                late = self._step(late)
        finally:
            for warps in self._warps:
                warps.stop()
        while self._copies:
            self._finish_copy()

    def start(self, name: str, count: int, function: Callable[[], Any], *, is_program: bool = False) -> Warps:
        """Starts so many warps that run a function together."""
        warps = Warps(self, name, count, function, is_program=is_program)
        self._warps.append(warps)
        return warps

    def later(self, copy: Callable[[], None]) -> None:
        """Calls a function at some later time."""
        self._copies.append(copy)

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        """Lets others run until the condition holds."""
        self.current.pause(condition, reason)

    def enter(self, warps: Warps) -> None:
        """Says which warps this thread is."""
        self._local.warps = warps

    def _step(self, late: Any) -> Any:
        self._warps = [warps for warps in self._warps if not warps.done]
        if self._random.random() < _SWITCH:
            roles = [warps for warps in self._warps if not warps.is_program]
            late = self._random.choice([None, self._copies, *roles])
        ready = [warps for warps in self._warps if warps.condition()]
        others = [warps for warps in ready if warps is not late]
        if self._copies and not (others and (late is self._copies or self._random.random() < 0.5)):
            self._finish_copy()
        elif ready:
            self._random.choice(others or ready).resume()
        else:
            waiting = [f"{warps.role.name}: {warps.reason}" for warps in self._warps if not warps.is_program]
            raise Deadlock(f"all wait: {'; '.join(waiting)}")
        return late

    def _finish_copy(self) -> None:
        self._copies.pop(self._random.randrange(len(self._copies)))()


class Warps:
    """Warps that run one function together, in a thread that runs when it is told to."""

    def __init__(
        self, scheduler: Scheduler, name: str, count: int, function: Callable[[], Any], *, is_program: bool
    ) -> None:
        self.role, self.count, self.is_program = Role(name), count, is_program
        # What the machine has under way for them.
        self.products: list[Any] = []
        self.gathers: list[Any] = []
        self.condition: Callable[[], bool] = lambda: True
        self.reason, self.done = "", False
        self._error: BaseException | None = None
        self._stopped = False
        # Locks that one thread takes and another releases: semaphores of Python's take ten times as long.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(scheduler, function), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Lets them run until they wait or end."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, condition: Callable[[], bool], reason: str) -> None:
        """In their own thread: waits for a condition."""
        self.condition, self.reason = condition, reason
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise SystemExit

    def stop(self) -> None:
        """Ends their thread wherever it is."""
        if not self.done:
            self._stopped = True
            self._go.release()
            self._thread.join()

    def _run(self, scheduler: Scheduler, function: Callable[[], Any]) -> None:
        scheduler.enter(self)
        self._go.acquire()
        try:
            if not self._stopped:
                function()
        except SystemExit:
            pass
        except BaseException as error:
            self._error = error
        self.done = True
        self._back.release()
