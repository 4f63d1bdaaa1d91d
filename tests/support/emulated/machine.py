"""One program's warps, barriers, copies and matrix products; a seeded scheduler decides who comes next.

Copies happen at any time after they were asked for, products as late as they may: when they are waited for. For
stretches of time one of the roles, or the copies, stand still for as long as anything else can go on. What reads too
early or gives memory away too early computes something else then, or never ends, which is an error here; so is what is
still under way when the program ends, and its shared memory with it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.emulated.values import Pointer, Shared, Tensor, plain

__all__ = ["Deadlock", "Machine", "Product"]

# How often it is decided anew who stands still.
_SWITCH = 1 / 32


class Deadlock(AssertionError):
    """Warps wait for what nobody will do."""


class Product(Tensor):
    """Sums of a matrix product that may still be running."""

    def __init__(self, left: Any, right: Shared, sums: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__(np.zeros(shape, np.float32))
        self._operands: tuple[Any, Shared, Tensor | None] | None = (left, right, sums)

    @property
    def array(self) -> np.ndarray:
        """The sums; an error before they are waited for."""
        if self._operands is not None:
            raise AssertionError("a product was read before it was waited for")
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """Known before the sums are."""
        return self._array.shape

    def finish(self) -> None:
        """Multiplies what the operands hold now."""
        assert self._operands is not None
        left, right, sums = self._operands
        self._operands = None
        with np.errstate(all="ignore"):
            product = left.array.astype(np.float32) @ right.array.astype(np.float32)
            self._array = product if sums is None else sums.array + product


class Machine:
    """Runs the warps of one program.

    Args:
        seed: of the order in which warps and copies come.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._barriers: dict[int, _Barrier] = {}
        self._hardware: dict[int, list[int]] = {}
        self._copies: list[Callable[[], None]] = []
        self._local = threading.local()

    def run(self, roles: Sequence[tuple[str, int, Callable[[], Any]]]) -> None:
        """Runs roles of (name, warps, function) side by side to their ends.

        Raises:
            Deadlock: all of those left wait.
            AssertionError: copies run, or hardware barriers count threads, when all have ended.
        """
        warps = [_Warps(self, name, count, function) for name, count, function in roles]
        late: Any = None
        try:
            while any(not warp.done for warp in warps):
                if self._random.random() < _SWITCH:
                    late = self._random.choice([None, self._copies, *warps])
                ready = [warp for warp in warps if not warp.done and warp.condition()]
                others = [warp for warp in ready if warp is not late]
                if self._copies and not (others and (late is self._copies or self._random.random() < 0.5)):
                    self._copies.pop(self._random.randrange(len(self._copies)))()
                elif ready:
                    self._random.choice(others or ready).resume()
                else:
                    waiting = [f"{warp.name}: {warp.reason}" for warp in warps if not warp.done]
                    raise Deadlock(f"all wait: {'; '.join(waiting)}")
        finally:
            for warp in warps:
                warp.stop()
        for warp in warps:
            if warp.gathers:
                raise AssertionError(f"{warp.name} told no barrier of {len(warp.gathers)} of its copies")
        if self._copies:
            raise AssertionError(f"the program ended before {len(self._copies)} of its copies")
        for number, (threads, _) in self._hardware.items():
            if threads:
                raise AssertionError(f"the program ended with {threads} threads at hardware barrier {number}")

    def num_warps(self) -> int:
        """How many warps run the function of this thread; 0 before there are roles."""
        warps = getattr(self._local, "warps", None)
        return 0 if warps is None else warps.count

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        """Lets others run until the condition holds."""
        self._local.warps.pause(condition, reason)

    def barrier(self, memory: Shared) -> _Barrier:
        """The barrier in shared memory at this place."""
        return self._barriers.setdefault(memory.address, _Barrier())

    def arrive(self, memory: Shared, count: int = 1, expected: int = 0) -> None:
        """Arrives at a barrier in shared memory; it waits for so many bytes more."""
        self.barrier(memory).arrive(count, expected)
        self.wait(lambda: True, "")

    def await_phase(self, memory: Shared, phase: int) -> None:
        """Waits until the phase of this parity is complete."""
        barrier = self.barrier(memory)
        self.wait(lambda: barrier.phase != int(phase), f"phase {int(phase)} of a barrier")

    def copy(self, source: np.ndarray, memory: Shared, barrier: Shared) -> None:
        """Copies at some later time, and tells the barrier."""

        def finish() -> None:
            memory.array[...] = source.reshape(memory.shape)
            self.barrier(barrier).receive(memory.array.nbytes)

        self._copies.append(finish)

    def gather(self, memory: Shared, pointer: Pointer, mask: Any) -> None:
        """Copies what is pointed to at some later time, zeros where masked."""
        self._local.warps.gathers.append((memory, pointer, mask))

    def arrive_after_gathers(self, memory: Shared) -> None:
        """Lets each thread arrive at a barrier when all that its warps gather has come."""
        warps = self._local.warps
        gathers, warps.gathers = warps.gathers, []

        def finish() -> None:
            for part, pointer, mask in gathers:
                part.store(pointer.load(mask))
            self.barrier(memory).arrive(32 * warps.count, 0)

        self._copies.append(finish)

    def hardware_barrier(self, number: int, threads: int, *, waits: bool) -> None:
        """A hardware barrier of so many threads; each warp arrives, and stays if it `waits`."""
        state = self._hardware.setdefault(number, [0, 0])
        state[0] += 32 * self._local.warps.count
        if state[0] > threads:
            raise AssertionError(f"{state[0]} threads at hardware barrier {number} of {threads}")
        turn = state[1]
        if state[0] == threads:
            state[0], state[1] = 0, turn + 1
        self.wait(lambda: not waits or state[1] != turn, f"hardware barrier {number}")

    def multiply(self, left: Any, right: Shared, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        """Starts a product; the operand in registers is read now, those in shared memory at the end."""
        left = Tensor(plain(left).copy()) if isinstance(left, Tensor) else left
        product = Product(left, right, sums if use_acc else None, sums.shape if use_acc else tuple(sums.shape))
        self._local.warps.products.append(product)
        return product if is_async else self.finish_products(0, (product,))

    def finish_products(self, running: int, deps: Sequence[Any]) -> Any:
        """Waits until at most so many products are running. Returns `deps`."""
        products = self._local.warps.products
        while len(products) > int(running):
            products.pop(0).finish()
        return deps[0] if len(deps) == 1 else tuple(deps)

    def enter(self, warps: _Warps) -> None:
        """Says which warps this thread is."""
        self._local.warps = warps


class _Barrier:
    """A barrier in shared memory: arrivals and bytes that are still missing."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def open(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self, count: int, expected: int) -> None:
        self.missing -= count
        self.bytes += expected
        if self.missing < 0:
            raise AssertionError("more arrivals at a barrier than it has readers")
        self._settle()

    def receive(self, size: int) -> None:
        self.bytes -= size
        self._settle()

    def _settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing = self.count
            self.phase ^= 1


class _Warps:
    """Warps that run one function together, in a thread that runs when it is told to."""

    def __init__(self, machine: Machine, name: str, count: int, function: Callable[[], Any]) -> None:
        self.name, self.count, self.products = name, count, []  # type: ignore[var-annotated]
        self.gathers: list[tuple[Shared, Pointer, Any]] = []
        self.condition: Callable[[], bool] = lambda: True
        self.reason, self.done = "", False
        self._error: BaseException | None = None
        self._stopped = False
        # Locks that one thread takes and another releases: semaphores of Python's take ten times as long.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(machine, function), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, condition: Callable[[], bool], reason: str) -> None:
        self.condition, self.reason = condition, reason
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise SystemExit

    def stop(self) -> None:
        if not self.done:
            self._stopped = True
            self._go.release()
            self._thread.join()

    def _run(self, machine: Machine, function: Callable[[], Any]) -> None:
        machine.enter(self)
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
