"""Every exception that jattn and torch_core raise on purpose, and nothing else.

A new class is added only where a caller would react differently to it. The wording of a message lives in the
module that makes the check: it names the argument, the value, the limit, the first bad index and the fix.
"""

from __future__ import annotations

__all__ = [
    "CacheCorruption",
    "EngineAsleep",
    "InvalidInput",
    "JattnError",
    "OutOfBlocks",
    "PoolLost",
    "RequestTooLong",
    "Unsupported",
]


class JattnError(Exception):
    """The base of every error that this project raises on purpose."""


class InvalidInput(JattnError, ValueError):
    """The caller passed something that can never be right; no state has changed."""


class EngineAsleep(InvalidInput):
    """The engine gave its pool's memory away until `wake`; its requests survive that, and whoever waits tries again."""


class RequestTooLong(InvalidInput):
    """A request needs more blocks or tokens than the pool or the model can ever give it."""


class Unsupported(JattnError, NotImplementedError):
    """A valid request that this build, device or implementation does not serve; the message says what does."""


class OutOfBlocks(JattnError, RuntimeError):
    """The pool has too few blocks at the moment; wait, preempt or evict, then try again.

    Attributes:
        needed: blocks that the refused operation asked for.
        free: blocks on the free list when it was refused.
        evictable: cached blocks without a holder that could be evicted, counted apart from `free`.
    """

    def __init__(self, message: str, *, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.evictable = evictable


class CacheCorruption(JattnError, RuntimeError):
    """An invariant of the block allocator does not hold: a bug of ours, or memory that someone else wrote.

    Attributes:
        report: one sentence for each broken invariant, with the ids of the blocks involved.
    """

    def __init__(self, message: str, *, report: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.report = report


class PoolLost(JattnError, RuntimeError):
    """A step failed after it had consumed the donated cache arrays; their contents are gone.

    Attributes:
        generation: the generation of the pool that was lost. A rebuilt pool has a higher one.
    """

    def __init__(self, message: str, *, generation: int) -> None:
        super().__init__(message)
        self.generation = generation
