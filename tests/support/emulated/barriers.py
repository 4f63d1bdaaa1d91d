"""Barriers of a program that tell what another order of its roles would do to them.

A role knows of an event of another role if barriers say that it came before. A barrier asks what its roles know, not
only what happened: a fault is found in every order in which the roles may come.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HardwareBarrier", "Role", "SharedBarrier"]


class Role:
    """Warps that run one function together, and the number of each role's waits that they know to have ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[Role, int] = {}

    def learn(self, known: Mapping[Role, int]) -> int:
        """Ends a wait by which the role knows what others knew. Returns the number of its waits."""
        _merge(self.known, known)
        self.known[self] = self.known.get(self, 0) + 1
        return self.known[self]


class SharedBarrier:
    """A barrier in shared memory: arrivals and bytes that are still missing in its present phase.

    A wait names a phase by its parity. If two phases end before a role has seen the first one, the role waits for the
    next of that parity: on a device it may wait for ever.
    """

    def __init__(self) -> None:
        self.open(0)

    def open(self, count: int) -> None:
        """Sets how many arrivals end a phase."""
        self._count = self._missing = count
        self._bytes = 0
        self._arrived: dict[Role, int] = {}
        # What those knew who ended each phase, and the last phase that a role saw, with the number of its wait.
        self._ended: list[dict[Role, int]] = []
        self._seen: dict[Role, tuple[int, int]] = {}

    def arrive(self, count: int, expected: int, known: Mapping[Role, int]) -> None:
        """Counts arrivals, and bytes that are to come."""
        self._missing -= count
        self._bytes += expected
        if self._missing < 0:
            raise AssertionError("more arrivals at a barrier than it has readers")
        self._settle(known)

    def receive(self, size: int, known: Mapping[Role, int]) -> None:
        """Counts bytes that have come."""
        self._bytes -= size
        self._settle(known)

    def awaited(self, role: Role, parity: int) -> int:
        """The number of the phase that a role waits for: of this parity, the next one that it has not seen.

        A role may wait again for a phase that it has seen, while no other one has ended.
        """
        last = self._seen[role][0] if role in self._seen else len(self._ended) - 2
        if (last + parity) % 2 == 0 and len(self._ended) == last + 1:
            return last
        return last + 1 + (last + 1 + parity) % 2

    def is_over(self, phase: int) -> bool:
        """Whether a phase has ended."""
        return phase < len(self._ended)

    def see(self, role: Role, phase: int) -> None:
        """A role has waited for a phase."""
        if phase + 1 < len(self._ended):
            raise AssertionError(f"{role.name} waits for phase {phase} of a barrier, and phase {phase + 1} is over")
        self._seen[role] = phase, role.learn(self._ended[phase] if phase >= 0 else {})

    def _settle(self, known: Mapping[Role, int]) -> None:
        _merge(self._arrived, known)
        if self._missing == 0 and self._bytes == 0:
            before = len(self._ended) - 1
            for role, (phase, wait) in self._seen.items():
                if phase == before and self._arrived.get(role, 0) < wait:
                    raise AssertionError(f"a barrier's phase may end before {role.name} has seen the one before it")
            self._ended.append(self._arrived)
            self._arrived = {}
            self._missing = self._count


class HardwareBarrier:
    """A hardware barrier: the threads that have arrived, and what was known each time that it was full."""

    def __init__(self) -> None:
        self.threads = 0
        self.ended: list[dict[Role, int]] = []
        self._arrived: dict[Role, int] = {}
        # Those who are there, and those who were there when it was full, with the number of their arrival.
        self._here: dict[Role, int] = {}
        self._last: dict[Role, int] = {}

    def arrive(self, role: Role, threads: int, wanted: int, number: int) -> None:
        """Threads of a role arrive at the barrier of this number, which is full with so many as are wanted."""
        if role in self._here or any(role.known.get(other, 0) < wait for other, wait in self._last.items()):
            raise AssertionError(f"{role.name} may arrive twice at hardware barrier {number} before it is full")
        self.threads += threads
        if self.threads > wanted:
            raise AssertionError(f"{self.threads} threads at hardware barrier {number} of {wanted}")
        self._here[role] = role.learn({})
        _merge(self._arrived, role.known)
        if self.threads == wanted:
            self.ended.append(self._arrived)
            self._arrived = {}
            self._last, self._here = self._here, {}
            self.threads = 0


def _merge(known: dict[Role, int], more: Mapping[Role, int]) -> None:
    for role, wait in more.items():
        known[role] = max(known.get(role, 0), wait)
