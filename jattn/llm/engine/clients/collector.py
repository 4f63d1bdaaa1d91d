"""Python's garbage collector while an engine generates."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_old_objects() -> Iterator[None]:
    """Leaves out of garbage collections, inside, what exists at the beginning.

    A search of all objects takes 0.3 s and more in a process with JAX's compiled programs, and every step waits for it.
    Objects made inside are collected as always. Nothing happens if objects are left out already, by the caller's own
    `gc.freeze` or by another thread.

    Source: vLLM's `EngineCore` freezes what exists after its start (vllm/v1/engine/core.py), for ever.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
