"""Python's garbage collector while an engine is measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_old_objects() -> Iterator[None]:
    """Leaves out of garbage collections, inside, what exists at the beginning; `LLM` says why.

    Objects made inside are collected as always. What the caller left out by `gc.freeze` stays left out.

    Not for calls that repeat without end: Python starts its counts again afterwards, and rarely searches old objects.

    Source: vLLM's `EngineCore` freezes what exists after its start (vllm/v1/engine/core.py).
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
