"""Checks of plain values that users pass, with messages that can print any value; standard library only."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch_core.base.errors import InvalidInput
from torch_core.base.errors import shown as shown

_P = ParamSpec("_P")
_R = TypeVar("_R")

INT32_MAX = (1 << 31) - 1


def check_int(name: str, value: Any, low: int, high: int | None = None, *, also: str = "") -> None:
    """Raises InvalidInput unless `value` is an int, and no bool, from `low` to `high`; None for no upper limit.

    The message names the argument, the value and the limits, and `also`, an alternative value.
    """
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and low <= value and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    an_int = "" if is_int and high is not None else "an int "
    raise refused_number(name, value, f"it must be {an_int}{limits}{also}", is_kind=is_int)


def refused_number(name: str, value: object, wanted: str, *, is_kind: bool) -> InvalidInput:
    """Returns the error of an argument that is no number in its range, or, without `is_kind`, none of its kind."""
    if not is_kind and isinstance(value, numbers.Number):
        # The number alone may look right: numpy's say of which type they are.
        return InvalidInput(name, f"is {value!r}", wanted, value=value)
    return InvalidInput(argument=name, value=value, wanted=wanted)


def check_heads(name: str, num_heads: int, num_kv_heads: int) -> None:
    """Raises InvalidInput unless each key/value head has the same number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InvalidInput(name, value=num_heads, wanted=f"it must be a multiple of num_kv_heads, {num_kv_heads}")


def check_positive(name: str, value: float) -> None:
    """Raises InvalidInput unless a value is a number, and no bool, above 0 and finite."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise InvalidInput(argument=name, value=value, wanted="it must be positive and finite")


def check_bool(name: str, value: object) -> None:
    """Raises InvalidInput for a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidInput(argument=name, value=value, wanted="it must be True or False")


def call_named(name: str, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls a function under another name, the one that a TypeError about wrong arguments then has."""
    try:
        return function(*args, **kwargs)
    except TypeError:
        signature = inspect.signature(function)
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError as mismatch:
            raise TypeError(f"{name}() {mismatch}") from None
        of_any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = (each for each in signature.parameters.values() if each.default is each.empty)
        if missing := [
            repr(each.name) for each in required if each.kind not in of_any_number and each.name not in given
        ]:
            raise TypeError(f"{name}() missing {len(missing)} required arguments: {', '.join(missing)}") from None
        raise


def check_bounds(name: str, value: object) -> None:
    """Raises InvalidInput unless value is a tuple of a number from 0 on and one at least as large, or infinite."""
    if not (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(each, int | float) and not isinstance(each, bool) for each in value)
        and 0 <= value[0] <= value[1]
    ):
        wanted = "it must be two numbers in a tuple, the least from 0 on and the largest at least as large"
        raise InvalidInput(name, value=value, wanted=wanted)
