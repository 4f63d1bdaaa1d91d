"""Types and limits of fields and arguments, declared once with `Annotated`, and one check of them all.

`Annotated[int, Limits(1, 256)]` and `Annotated[str, Choices("a", "b")]` are fields of a dataclass whose `__post_init__`
calls `check_fields`, or arguments of a `checked` function. `Annotated` also takes a function of name and value that
raises InvalidInput. Standard library only.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from torch_core.base.checks import refused_number
from torch_core.base.errors import ArgumentError, InvalidInput

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Check: TypeAlias = Callable[[str, Any], None]
_NOUNS = {bool: "True or False", str: "a string", int: "an int", float: "a number", Callable: "a function"}


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a number: from `low` to `high`, `above` or `below` a value, and a multiple of an int.

    `also` is text after the range in the message, by default ", or None" for an int that may be None. `wanted` is text
    instead of the type and the range; it also serves types without a range.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    also: str | None = None
    wanted: str | None = None

    def describe(self) -> str:
        """Returns the range in words, such as "from 1 to 256" or "above 0 and at most 1"; empty without a range."""
        bounds: dict[str, Any] = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        if self.low is not None and self.high is not None:
            bounds = {f"from {_text(self.low)} to": self.high}
        bounds["a multiple of"] = self.multiple_of
        return " and ".join(f"{words} {_text(limit)}" for words, limit in bounds.items() if limit is not None)


class Choices:
    """The values that a field can have, and the error for another value; None is one if the type allows it."""

    def __init__(self, *values: Any, error: type[ArgumentError] = InvalidInput) -> None:
        self._values, self._error = values, error

    def __call__(self, name: str, value: Any) -> None:
        """Refuses another value."""
        # An array must not be compared with a name.
        if not any(type(value) is type(choice) and value == choice for choice in self._values):
            start = "it must be one of" if self._error is InvalidInput else "this build has"
            raise self._error(argument=name, value=value, wanted=f"{start} {', '.join(map(str, self._values))}")


def check_fields(instance: Any, *, prefix: str = "", of_numpy: bool = False) -> None:
    """Checks every field of a dataclass against its annotation.

    Numbers, flags, texts, classes, tuples of them and `None` are checked; `Any` and other annotations are not. A bool
    is no number, and a float is no int. numpy's numbers are accepted with `of_numpy`.

    Raises:
        InvalidInput: a value of another type or out of range; the message names the field, after the `prefix`.
    """
    for name, check in _checks_of(type(instance), of_numpy):
        check(prefix + name, getattr(instance, name))


def limits_of(declaration: Any) -> dict[str, Limits]:
    """Returns the declared limits of the fields of a dataclass, by name."""
    hints = get_type_hints(declaration, include_extras=True)
    return {name: extra for name, hint in hints.items() for extra in get_args(hint)[1:] if isinstance(extra, Limits)}


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function: each call checks the arguments against their annotations; see `check_fields`.

    Numbers may also be numpy's. Keywords of `**options: Unpack[Options]` are checked against that TypedDict, and
    `inspect.signature` and `help` list them; `...` means for the default of each.

    Example:
        >>> @checked
        ... def repeat(text: str, times: Annotated[int, Limits(1, 9)] = 1) -> str:
        ...     return text * times
        >>> repeat("ab", times=10)
        Traceback (most recent call last):
        torch_core.base.errors.InvalidInput: times is 10; it must be from 1 to 9.
    """
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # The function itself says so, with its name.
            return function(*args, **kwargs)
        if last.kind is last.VAR_KEYWORD:
            arguments.update(arguments.pop(last.name, {}))
        for name, check in _checks_of(function, True):
            if name in arguments:
                check(name, arguments[name])
        return function(*args, **kwargs)

    if last.kind is last.VAR_KEYWORD:
        # The annotation is text in a module with postponed annotations.
        declaration = get_args(get_type_hints(function)[last.name])[0]
        for name, annotation in inspect.get_annotations(declaration).items():
            text = getattr(annotation, "__forward_arg__", annotation)
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=text))
        call.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return call


@functools.cache
def _checks_of(declaration: Any, of_numpy: bool) -> tuple[tuple[str, _Check], ...]:
    """Returns a check for each name that a dataclass, a function or a TypedDict annotates."""
    hints = get_type_hints(declaration, include_extras=True)
    checks: list[tuple[str, _Check]] = []
    for name in [field.name for field in fields(declaration)] if is_dataclass(declaration) else hints:
        if get_origin(hints[name]) is typing.Unpack:
            checks += _checks_of(get_args(hints[name])[0], of_numpy)
        elif name != "return" and (check := _check_of(hints[name], of_numpy)) is not None:
            checks.append((name, check))
    return tuple(checks)


def _check_of(annotation: Any, of_numpy: bool) -> _Check | None:
    """Returns the check of one annotation; None if any value fits."""
    limits: Any = Limits()
    if get_origin(annotation) in (typing.Required, typing.NotRequired):
        (annotation,) = get_args(annotation)
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        limits = next((extra for extra in extras if isinstance(extra, Limits) or callable(extra)), limits)
    options = get_args(annotation) if get_origin(annotation) in (typing.Union, UnionType) else (annotation,)
    kinds = [option for option in options if option is not NoneType]
    may_be_none = len(kinds) < len(options)
    kind = kinds[0] if len(kinds) == 1 else None
    check: _Check | None
    if not isinstance(limits, Limits):
        check = limits
    elif get_origin(kind) is Annotated:
        check = _check_of(kind, of_numpy)
    elif get_origin(kind) is typing.Literal:
        check = Choices(*get_args(kind))
    elif kind in (int, float):
        check = functools.partial(_check_number, kind, of_numpy, limits, may_be_none)
    elif get_origin(kind) is tuple:
        check = functools.partial(_check_tuple, [_check_of(each, of_numpy) for each in get_args(kind)], limits)
    else:
        check = _check_of_classes(kinds, limits, may_be_none)
    if check is None or not may_be_none:
        return check
    return lambda name, value: None if value is None else check(name, value)


def _check_number(kind: type, of_numpy: bool, limits: Limits, may_be_none: bool, name: str, value: Any) -> None:
    is_int = kind is int
    classes: Any = (numbers.Integral if is_int else numbers.Real) if of_numpy else (int if is_int else (int, float))
    is_number = isinstance(value, classes) and not isinstance(value, bool)
    # An int may be larger than any float; it is compared and never converted.
    is_number = is_number and (isinstance(value, int) or math.isfinite(value))
    if (
        is_number
        and (limits.low is None or value >= limits.low)
        and (limits.high is None or value <= limits.high)
        and (limits.above is None or value > limits.above)
        and (limits.below is None or value < limits.below)
        and (limits.multiple_of is None or value % limits.multiple_of == 0)
    ):
        return
    noun, text = "an int" if is_int else "a finite number", limits.describe()
    if not is_number or (is_int and limits.high is None):
        text = f"{noun} of {text}" if text.startswith("at ") else f"{noun} {text}".rstrip()
    also = limits.also if limits.also is not None else ", or None" * (may_be_none and is_int)
    raise refused_number(name, value, f"it must be {limits.wanted or text + also}", is_kind=is_number)


def _check_tuple(elements: list[_Check | None], limits: Limits, name: str, value: Any) -> None:
    # The check of the Ellipsis in tuple[int, ...] is None.
    repeated = len(elements) == 2 and elements[1] is None
    if not isinstance(value, tuple) or not (repeated or len(value) == len(elements)):
        wanted = limits.wanted or "a tuple" + (not repeated) * f" of {len(elements)} elements"
        raise InvalidInput(argument=name, value=value, wanted=f"it must be {wanted}")
    for index, element in enumerate(value):
        check_element = elements[0 if repeated else index]
        if check_element is not None:
            check_element(f"{name}[{index}]", element)


def _check_of_classes(kinds: list[Any], limits: Limits, may_be_none: bool) -> _Check | None:
    classes = tuple(get_origin(kind) or kind for kind in kinds)
    # isinstance() does not accept Any, nor a protocol without runtime_checkable.
    if any(not isinstance(kind, type) or kind is Any or getattr(kind, "_is_protocol", False) for kind in classes):
        return None
    names = [_NOUNS.get(kind, f"a{'n' * (kind.__name__[0] in 'AEIOUaeio')} {kind.__name__}") for kind in classes]
    names += ["None"] * (may_be_none and bool not in classes)
    wanted = limits.wanted or " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

    def check(name: str, value: Any) -> None:
        if not isinstance(value, classes) or (isinstance(value, bool) and int in classes and bool not in classes):
            raise InvalidInput(argument=name, value=value, wanted=f"it must be {wanted}")

    return check


def _text(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
