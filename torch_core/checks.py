"""The check of a whole number, and its words; standard library only."""

from __future__ import annotations

from typing import Any

from torch_core.errors import InvalidInput

__all__ = ["INT32_MAX", "check_int", "shown"]

INT32_MAX = (1 << 31) - 1


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises InvalidInput unless `value` is an int, and no bool, from `low` to `high`; None for no upper limit."""
    is_int = not isinstance(value, bool) and isinstance(value, int)
    if isinstance(value, int) and is_int and low <= value and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    an_int = "" if is_int and high is not None else "an int "
    raise InvalidInput(f"{name} is {shown(value)}; it must be {an_int}{limits}.")


def shown(value: object) -> str:
    """Returns the value as text; Python refuses to write out an int of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an int of {value.bit_length()} bits"
    return repr(value)
