"""One program's barriers, copies and matrix products.

Copies happen at any time after they were asked for, products as late as they may: when they are waited for. What reads
too early or gives memory away too early computes something else then, or never ends, which is an error here; so is what
is still under way when the program ends, and its shared memory with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.emulated.barriers import HardwareBarrier, SharedBarrier
from tests.support.emulated.scheduler import Scheduler, Warps
from tests.support.emulated.values import Pointer, Shared, Tensor, plain

__all__ = ["Machine", "Product"]


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
    """What the warps of one program share.

    Args:
        scheduler: decides when they and their copies come.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._barriers: dict[int, SharedBarrier] = {}
        self._hardware: dict[int, HardwareBarrier] = {}
        self._copies: list[Callable[[], None]] = []

    def run(self, roles: Sequence[tuple[str, int, Callable[[], Any]]]) -> None:
        """Runs roles of (name, warps, function) side by side to their ends.

        Raises:
            AssertionError: copies run, or hardware barriers count threads, when all have ended.
        """
        warps = [self._scheduler.start(*role) for role in roles]
        self._scheduler.wait(lambda: all(one.done for one in warps), "the roles")
        for one in warps:
            if one.gathers:
                raise AssertionError(f"{one.role.name} told no barrier of {len(one.gathers)} of its copies")
        if self._copies:
            raise AssertionError(f"the program ended before {len(self._copies)} of its copies")
        for number, barrier in self._hardware.items():
            if barrier.threads:
                raise AssertionError(f"the program ended with {barrier.threads} threads at hardware barrier {number}")

    def num_warps(self) -> int:
        """How many warps run the function of this thread."""
        return self._current.count

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        """Lets others run until the condition holds."""
        self._scheduler.wait(condition, reason)

    def barrier(self, memory: Shared) -> SharedBarrier:
        """The barrier in shared memory at this place."""
        return self._barriers.setdefault(memory.address, SharedBarrier())

    def arrive(self, memory: Shared, count: int = 1, expected: int = 0) -> None:
        """Arrives at a barrier in shared memory; it waits for so many bytes more."""
        self.barrier(memory).arrive(count, expected, self._current.role.known)
        self.wait(lambda: True, "")

    def await_phase(self, memory: Shared, phase: int, pred: Any = True) -> None:
        """Waits until the phase of this parity is complete, where `pred` holds."""
        if not pred:
            return
        barrier, role = self.barrier(memory), self._current.role
        awaited = barrier.awaited(role, int(phase))
        self.wait(lambda: barrier.is_over(awaited), f"phase {int(phase)} of a barrier")
        barrier.see(role, awaited)

    def copy(self, source: np.ndarray, memory: Shared, barrier: Shared) -> None:
        """Copies at some later time, and tells the barrier."""
        known = dict(self._current.role.known)

        def finish() -> None:
            memory.array[...] = source.reshape(memory.shape)
            self.barrier(barrier).receive(memory.array.nbytes, known)

        self._later(finish)

    def gather(self, memory: Shared, pointer: Pointer, mask: Any) -> None:
        """Copies what is pointed to at some later time, zeros where masked."""
        self._current.gathers.append((memory, pointer, mask))

    def arrive_after_gathers(self, memory: Shared) -> None:
        """Lets each thread arrive at a barrier when all that its warps gather has come."""
        warps = self._current
        gathers, warps.gathers = warps.gathers, []
        known = dict(warps.role.known)

        def finish() -> None:
            for part, pointer, mask in gathers:
                part.store(pointer.load(mask))
            self.barrier(memory).arrive(32 * warps.count, 0, known)

        self._later(finish)

    def hardware_barrier(self, number: int, threads: int, *, waits: bool) -> None:
        """A hardware barrier of so many threads; each warp arrives, and stays if it `waits`."""
        barrier, warps = self._hardware.setdefault(number, HardwareBarrier()), self._current
        turn = len(barrier.ended)
        barrier.arrive(warps.role, 32 * warps.count, threads, number)
        self.wait(lambda: not waits or len(barrier.ended) > turn, f"hardware barrier {number}")
        if waits:
            warps.role.learn(barrier.ended[turn])

    def multiply(self, left: Any, right: Shared, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        """Starts a product; the operand in registers is read now, those in shared memory at the end."""
        left = Tensor(plain(left).copy()) if isinstance(left, Tensor) else left
        product = Product(left, right, sums if use_acc else None, sums.shape if use_acc else tuple(sums.shape))
        self._current.products.append(product)
        return product if is_async else self.finish_products(0, (product,))

    def finish_products(self, running: int, deps: Sequence[Any]) -> Any:
        """Waits until at most so many products are running. Returns `deps`."""
        products = self._current.products
        while len(products) > int(running):
            products.pop(0).finish()
        return deps[0] if len(deps) == 1 else tuple(deps)

    @property
    def _current(self) -> Warps:
        return self._scheduler.current

    def _later(self, function: Callable[[], None]) -> None:
        def copy() -> None:
            self._copies.remove(copy)
            function()

        self._copies.append(copy)
        self._scheduler.later(copy)
