"""The check of a whole number, and its words; standard library only."""

from __future__ import annotations

from torch_core.errors import InvalidInput

__all__ = ["INT32_MAX", "check_int", "shown"]

INT32_MAX = (1 << 31) - 1


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raises InvalidInput unless `value` is an int, and no bool, from `low` to `high`; None for no upper limit."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if high is None:
        if not is_int or value < low:
            raise InvalidInput(f"{name} is {shown(value)}; it must be an int of at least {low}.")
    elif not is_int:
        raise InvalidInput(f"{name} is {value!r}; it must be an int from {low} to {high}.")
    elif not low <= value <= high:
        raise InvalidInput(f"{name} is {shown(value)}; it must be from {low} to {high}.")


def shown(value: object) -> str:
    """Returns the value as text; Python refuses to write out an int of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an int of {value.bit_length()} bits"
    return repr(value)
