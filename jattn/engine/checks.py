"""Checks of plain values that users pass, with messages that can print whatever they passed."""

from __future__ import annotations

from torch_core.errors import InvalidInput

__all__ = ["check_bool", "check_int", "is_int", "shown"]

_LONGEST_TEXT = 80


def check_int(name: str, value: object, low: int, high: int, *, also: str = "") -> None:
    """Refuses what is no int from `low` to `high`.

    Raises:
        InvalidInput: naming the argument, its value and the limits; `also` says what else would do.
    """
    if not is_int(value) or not low <= value <= high:  # pyright: ignore[reportOperatorIssue]
        raise InvalidInput(f"{name} is {shown(value)}; it must be an int from {low} to {high}{also}.")


def check_bool(name: str, value: object) -> None:
    """Refuses what is neither True nor False.

    Raises:
        InvalidInput: naming the argument and its value.
    """
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {shown(value)}; it must be True or False.")


def is_int(value: object) -> bool:
    """Returns whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns a value's text for a message: short, and also for an int that Python refuses to print."""
    if is_int(value) and value.bit_length() > 256:  # pyright: ignore[reportAttributeAccessIssue]
        return f"an int of {value.bit_length()} bits"  # pyright: ignore[reportAttributeAccessIssue]
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
