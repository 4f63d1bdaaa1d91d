"""Guard: the effect of a step's failure on the pool whose caches it had."""

from __future__ import annotations

from typing import Protocol

from jattn.bridge import original_error
from torch_core.base.errors import PoolLost


class _Pool(Protocol):
    @property
    def generation(self) -> int: ...

    def is_lost(self) -> bool: ...

    def renew(self) -> None: ...


class Guard:
    """The context manager of `KVPool.guard`, no generator for the reason that `jattn.bridge.typed_errors` has."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is None:
            return
        original = original_error(error)
        try:
            if self._pool.is_lost():
                lost = self._pool.generation
                self._pool.renew()
                if isinstance(original, Exception):
                    raise PoolLost(
                        f"a step failed after it had consumed the KV pool of generation {lost} "
                        f"({type(original).__name__}: {original}). The pool is now generation "
                        f"{self._pool.generation} and empty: compute every sequence again.",
                        generation=lost,
                    ) from original
            if original is not error:
                raise original from None
        finally:
            del self._pool, original, error, frames
