"""Exceptions of a function inside a JAX program: XLA converts them to text, so they are kept and found again."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
from collections import OrderedDict

import jax


class typed_errors:  # noqa: N801 (used as contextlib's own managers are)
    """Re-raises a torch function's exception inside a JAX program as itself, not as the error that JAX raises.

    Wait for the program's results inside the block: JAX reports a failure only when a caller looks.

    Raises:
        Exception: the torch function's exception, KeyboardInterrupt included; a note says where it happened. The first
            look-up of a failure gives the object itself, later ones a copy.
    """

    def __enter__(self) -> None:
        pass

    # No generator: from Python 3.13 on contextlib's `__exit__` and an error that is replaced by another one there
    # reference each other, and so keep all objects of the frames in between.
    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        original = error if error is None else original_error(error)
        try:
            if original is not None and original is not error:
                raise original from None
        finally:
            # An error and a frame that it passed would form a cycle, and keep the objects of the other frames.
            del original, error, frames


def original_error(error: BaseException) -> BaseException:
    """Returns the torch function's exception if `error` is JAX's error for it, else the error itself."""
    # A program's first run raises a JaxRuntimeError, JAX's fast dispatch of later runs a plain ValueError.
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return _recorded.find(str(error)) or error
    return error


def recorded(error: BaseException) -> RuntimeError:
    """Returns the exception to raise into XLA instead of an error, so that `typed_errors` finds the error again.

    XLA converts any exception into text, KeyboardInterrupt too.
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
                    # Each output of a failed program raises the same text. The next look-up gets a copy: a raised
                    # exception collects the frames that it passes, and a kept one would keep their objects.
                    with contextlib.suppress(Exception):
                        self._errors[key] = copy.copy(error)
                    return error
        return None


# XLA carries nothing but text out of a callback, so the objects need a place outside any call: this one, bounded.
_recorded = _RecordedErrors()
