"""What a function raised inside a JAX program, which XLA turns into text: kept beside it, and found again."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
from collections import OrderedDict

import jax

__all__ = ["original_error", "recorded", "typed_errors"]


class typed_errors:  # noqa: N801 (used as contextlib's own managers are)
    """Re-raises what a torch function raised inside a JAX program as itself, not as the error that JAX makes of it.

    Wait for the program's results inside the block: JAX reports a failure only when somebody looks.

    Raises:
        Exception: whatever the torch function raised, KeyboardInterrupt included; where it happened stands in a note.
            The first look at a failure gives the very object, a later one a copy.
    """

    def __enter__(self) -> None:
        pass

    # No generator: from Python 3.13 on contextlib's `__exit__` and an error that becomes another one there keep each
    # other, and so whatever the frames between hold.
    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        original = error if error is None else original_error(error)
        try:
            if original is not None and original is not error:
                raise original from None
        finally:
            # An error and a frame that it passed would be a cycle, and keep what the other frames hold.
            del original, error, frames


def original_error(error: BaseException) -> BaseException:
    """Returns what a torch function raised, if `error` is what JAX made of it, else the error itself."""
    # A program's first run raises a JaxRuntimeError, JAX's fast dispatch of later runs a plain ValueError.
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return _recorded.find(str(error)) or error
    return error


def recorded(error: BaseException) -> RuntimeError:
    """Returns what to raise into XLA in place of an error, so that `typed_errors` finds it again.

    XLA turns any exception into text, KeyboardInterrupt too.
    """
    return RuntimeError(f"{type(error).__name__}: {error} [{_recorded.put(error)}]")


class _RecordedErrors:
    """The last few exceptions raised inside callbacks, by the key that their message carries through XLA."""

    _CAPACITY = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._errors: OrderedDict[str, BaseException] = OrderedDict()

    def put(self, error: BaseException) -> str:
        with self._lock:
            key = f"jattn-callback-error-{next(self._numbers)}"
            self._errors[key] = error
            while len(self._errors) > self._CAPACITY:
                self._errors.popitem(last=False)
            return key

    def find(self, text: str) -> BaseException | None:
        with self._lock:
            for key in re.findall(r"jattn-callback-error-\d+", text):
                if (error := self._errors.pop(key, None)) is not None:
                    # Each output of a failed program raises the same text. The next look at it gets a copy: what is
                    # handed out gathers the frames of all whom it passes, and a kept one would keep what they hold.
                    with contextlib.suppress(Exception):
                        self._errors[key] = copy.copy(error)
                    return error
        return None


# XLA carries nothing but text out of a callback, so the objects need a place outside any call: this one, bounded.
_recorded = _RecordedErrors()
