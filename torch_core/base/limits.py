"""Types and limits of fields and arguments, declared once with `Annotated`, and one check of them all.

    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        block_size: Annotated[int, Limits(1, 256)] = 16
        seed: Annotated[int | None, Limits(0)] = None
        dtype: Annotated[str, Choices("float32", "bfloat16")] = "float32"

        def __post_init__(self) -> None:
            check_fields(self)

Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, JattnError

__all__ = ["Choices", "Limits", "check_arguments", "check_fields"]

_Check: TypeAlias = Callable[[str, Any], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a number.

    Attributes:
        low: the smallest value; None for no lower limit.
        high: the largest value; None for no upper limit.
        above: the value must be greater than this; an alternative to `low`.
        below: the value must be less than this; an alternative to `high`.
        multiple_of: the value must be a multiple of this int.
        also: text after the range in the message. By default it is ", or None" for an int that may be None.
        wanted: text in the message instead of the type and the range. It also serves types without a range.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    also: str | None = None
    wanted: str | None = None

    def contains(self, value: float) -> bool:
        """Returns whether a number is in the range."""
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def describe(self) -> str:
        """Returns the range in words, such as "from 1 to 256" or "above 0 and at most 1"; empty without a range."""
        if self.low is not None and self.high is not None:
            parts = [f"from {_text(self.low)} to {_text(self.high)}"]
        else:
            bounds = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
            parts = [f"{words} {_text(limit)}" for words, limit in bounds.items() if limit is not None]
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True, init=False)
class Choices:
    """The values that a field can have; None is one of them where the type allows it.

    Attributes:
        values: the values.
        error: the class of the error for any other value.
    """

    values: tuple[Any, ...]
    error: type[JattnError]

    def __init__(self, *values: Any, error: type[JattnError] = InvalidInput) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "error", error)


def check_fields(instance: Any, *, prefix: str = "") -> None:
    """Checks every field of a dataclass against its annotation.

    Numbers, flags, texts, classes, tuples of them and `None` are checked; `Any` and other annotations are not. A bool
    is no number, and a float is no int.

    Args:
        instance: the dataclass.
        prefix: text before the field's name in a message, such as "rope_scaling.".

    Raises:
        InvalidInput: a value of another type or out of range; the message names the field.
    """
    for name, check in _checks_of(type(instance)):
        check(prefix + name, getattr(instance, name))


def check_arguments(declaration: Any, arguments: Mapping[str, Any]) -> None:
    """Checks arguments by name against the annotations of a function or a TypedDict; see `check_fields`.

    Args:
        declaration: the function or the TypedDict.
        arguments: the values. Names that `declaration` does not annotate are ignored.

    Raises:
        InvalidInput: as in `check_fields`.
    """
    for name, check in _checks_of(declaration):
        if name in arguments:
            check(name, arguments[name])


@functools.cache
def _checks_of(declaration: Any) -> tuple[tuple[str, _Check], ...]:
    hints = get_type_hints(declaration, include_extras=True)
    is_dataclass = hasattr(declaration, "__dataclass_fields__")
    names = [field.name for field in fields(declaration)] if is_dataclass else list(hints)
    checks = ((name, _check_of(hints[name])) for name in names if name != "return")
    return tuple((name, check) for name, check in checks if check is not None)


def _check_of(annotation: Any) -> _Check | None:
    """Returns the check of one annotation; None if any value fits."""
    limits: Limits | Choices = Limits()
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        limits = next((extra for extra in extras if isinstance(extra, Limits | Choices)), limits)
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = [option for option in options if option is not NoneType]
    may_be_none = len(kinds) < len(options)
    if len(kinds) == 1 and get_origin(kinds[0]) is Annotated:
        check = _check_of(kinds[0])
    elif isinstance(limits, Choices):
        check = functools.partial(_check_choice, limits)
    elif len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        check = functools.partial(_check_choice, Choices(*get_args(kinds[0])))
    elif len(kinds) == 1 and kinds[0] in (int, float):
        check = functools.partial(_check_number, kinds[0], limits, may_be_none)
    elif len(kinds) == 1 and get_origin(kinds[0]) is tuple:
        check = _check_of_tuple(get_args(kinds[0]))
    else:
        check = _check_of_classes(kinds, limits, may_be_none)
    if check is None or not may_be_none:
        return check
    return lambda name, value: None if value is None else check(name, value)


def _check_number(kind: type[int | float], limits: Limits, may_be_none: bool, name: str, value: Any) -> None:
    is_kind = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    # An int may be larger than any float; it is compared and never converted.
    is_kind = is_kind and (not isinstance(value, float) or math.isfinite(value))
    if is_kind and limits.contains(value):
        return
    noun, text = "an int" if kind is int else "a finite number", limits.describe()
    if not is_kind or (kind is int and limits.high is None):
        text = f"{noun} of {text}" if text.startswith("at ") else f"{noun} {text}".rstrip()
    also = limits.also if limits.also is not None else ", or None" * (may_be_none and kind is int)
    raise InvalidInput(f"{name} is {shown(value)}; it must be {limits.wanted or text + also}.")


def _check_choice(choices: Choices, name: str, value: Any) -> None:
    # An unhashable value, or an array, is compared by type first.
    if any(type(value) is type(choice) and value == choice for choice in choices.values):
        return
    known = ", ".join(map(str, choices.values))
    wanted = f"it must be one of {known}" if choices.error is InvalidInput else f"this build has {known}"
    raise choices.error(f"{name} is {shown(value)}; {wanted}.")


def _check_of_tuple(elements: tuple[Any, ...]) -> _Check:
    repeated = len(elements) == 2 and elements[1] is Ellipsis
    checks = [_check_of(element) for element in (elements[:1] if repeated else elements)]

    def check(name: str, value: Any) -> None:
        if not isinstance(value, tuple) or not (repeated or len(value) == len(checks)):
            size = "" if repeated else f" of {len(checks)} elements"
            raise InvalidInput(f"{name} is {shown(value)}; it must be a tuple{size}.")
        for index, element in enumerate(value):
            check_element = checks[0] if repeated else checks[index]
            if check_element is not None:
                check_element(f"{name}[{index}]", element)

    return check


def _check_of_classes(kinds: list[Any], limits: Limits, may_be_none: bool) -> _Check | None:
    classes = tuple(get_origin(kind) or kind for kind in kinds)
    if Any in classes or not all(isinstance(kind, type) for kind in classes):
        return None
    nouns = {bool: "True or False", str: "a string", int: "an int", float: "a number"}
    names = [nouns.get(kind, f"{'an' if kind.__name__[0] in 'AEIOUaeio' else 'a'} {kind.__name__}") for kind in classes]
    names += ["None"] * (may_be_none and bool not in classes)
    wanted = limits.wanted or " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

    def check(name: str, value: Any) -> None:
        is_flag = isinstance(value, bool) and bool not in classes and (int in classes or float in classes)
        if not isinstance(value, classes) or is_flag:
            raise InvalidInput(f"{name} is {shown(value)}; it must be {wanted}.")

    return check


def _text(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
