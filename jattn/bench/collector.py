"""Python's garbage collector while an engine is measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Python 3.12 leaves out some hundred objects of its own; a process with JAX has hundreds of thousands.
_FEW_OBJECTS = 10_000


@contextlib.contextmanager
def without_old_objects() -> Iterator[None]:
    """Leaves out of garbage collections, inside, what exists at the beginning; `LLM` says why.

    Objects made inside are collected as always. What the caller left out by `gc.freeze` stays left out.

    Not for calls that repeat without end: Python starts its counts again afterwards, and rarely searches old objects.

    Source: vLLM's `EngineCore` freezes what exists after its start (vllm/v1/engine/core.py).
    """
    if gc.get_freeze_count() > _FEW_OBJECTS:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
