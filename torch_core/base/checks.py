"""Checks of plain values that users pass, with messages that can print whatever that is; standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeGuard, TypeVar

from torch_core.base.errors import InvalidInput

__all__ = ["INT32_MAX", "call_named", "check_bool", "check_int", "shown"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

INT32_MAX = (1 << 31) - 1
_LONGEST_TEXT = 80


def check_int(name: str, value: Any, low: int, high: int | None = None, *, also: str = "") -> None:
    """Raises InvalidInput unless `value` is an int, and no bool, from `low` to `high`; None for no upper limit.

    The message names the argument, the value and the limits, and `also`, what else would do.
    """
    if _is_int(value) and low <= value and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    an_int = "" if _is_int(value) and high is not None else "an int "
    raise InvalidInput(f"{name} is {shown(value)}; it must be {an_int}{limits}{also}.")


def check_bool(name: str, value: object) -> None:
    """Raises InvalidInput for what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {shown(value)}; it must be True or False.")


def call_named(name: str, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls a function that stands behind another name, which Python's complaint about wrong arguments has then."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        _, own, reason = str(error).partition(f"{function.__qualname__}()")
        if own:
            raise TypeError(f"{name}(){reason}") from None
        raise


def _is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns a value's text for a message: short, and also for an int that Python refuses to print."""
    if _is_int(value) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
