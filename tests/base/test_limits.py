"""Limits that fields and arguments declare with their types: what they accept, and the message for everything else."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Required, SupportsIndex, TypedDict, Unpack

import numpy as np
import pytest

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.base.limits import Choices, Limits, check_fields, checked


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    count: Annotated[int, Limits(1, 8)] = 1
    least: Annotated[int, Limits(1)] = 1
    even: Annotated[int, Limits(0, 64, multiple_of=2)] = 0
    seed: Annotated[int | None, Limits(0, 9)] = None
    tokens: Annotated[int | None, Limits(1, 9, also="")] = None
    scale: Annotated[float, Limits(1e-6, 1e6)] = 1.0
    share: Annotated[float, Limits(above=0, high=1)] = 1.0
    cap: Annotated[float | None, Limits(above=0)] = None
    heat: Annotated[float, Limits(low=0, high=9.0, wanted="a number of at least 0")] = 1.0
    flag: bool = True
    choice: bool | None = None
    json_flag: Annotated[bool, Limits(wanted="true or false")] = True
    name: str = ""
    kind: Annotated[str | None, Choices("a", "b")] = None
    method: Annotated[str, Choices("x", "y", error=Unsupported)] = "x"
    side: Literal["left", "right"] = "left"
    color: Color = Color.RED
    part: Part | None = None
    names: Mapping[str, Any] | None = None
    windows: tuple[Annotated[int | None, Limits(1, 9, also="")], ...] = ()
    pair: tuple[int | None, int | None] | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


class Rest(TypedDict, total=False):
    side: Annotated[str, Choices("left", "right")]
    at: Required[int]


def check_even(name: str, value: Any) -> None:
    if value % 2:
        raise InvalidInput(argument=name, value=value, wanted="it must be even")


@checked
def described(
    count: Annotated[int, Limits(1, 8)],
    scale: float = 1.0,
    even: Annotated[int, check_even] = 0,
    dtype: SupportsIndex | str = "",
    **options: Unpack[Rest],
) -> tuple[int, Rest]:
    """Returns what it got."""
    return count, options


@checked
def _fixed(count: int) -> int:
    return count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"count": 8, "least": 10**400, "even": 2, "seed": 0, "tokens": 9},
        {"scale": 1, "share": 1, "cap": 10**400, "choice": True, "json_flag": False, "kind": "b", "side": "right"},
        {"part": Part(), "names": {"a": 1}, "windows": (1, None), "pair": (None, 3), "anything": b"x"},
    ],
    ids=str,
)
def test_values_within_their_limits_are_accepted(changes):
    Options(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count is 0; it must be from 1 to 8."),
        ({"count": "3"}, "count is '3'; it must be an int from 1 to 8."),
        ({"count": True}, "count is True; it must be an int from 1 to 8."),
        ({"count": 2.0}, "count is 2.0; it must be an int from 1 to 8."),
        ({"count": np.int64(3)}, "count is np.int64(3); it must be an int from 1 to 8."),
        ({"count": None}, "count is None; it must be an int from 1 to 8."),
        ({"least": 0}, "least is 0; it must be an int of at least 1."),
        ({"even": 3}, "even is 3; it must be from 0 to 64 and a multiple of 2."),
        ({"seed": -1}, "seed is -1; it must be from 0 to 9, or None."),
        ({"tokens": 10}, "tokens is 10; it must be from 1 to 9."),
        ({"scale": 0.0}, "scale is 0.0; it must be from 1e-06 to 1e+06."),
        ({"scale": float("nan")}, "scale is nan; it must be a finite number from 1e-06 to 1e+06."),
        ({"scale": 10**400}, "scale is an int of 1329 bits; it must be from 1e-06 to 1e+06."),
        ({"share": 0}, "share is 0; it must be above 0 and at most 1."),
        ({"cap": -1.5}, "cap is -1.5; it must be above 0."),
        ({"cap": "1"}, "cap is '1'; it must be a finite number above 0."),
        ({"heat": -1}, "heat is -1; it must be a number of at least 0."),
        ({"flag": 1}, "flag is 1; it must be True or False."),
        ({"choice": "yes"}, "choice is 'yes'; it must be True or False."),
        ({"json_flag": 1}, "json_flag is 1; it must be true or false."),
        ({"name": 3}, "name is 3; it must be a string."),
        ({"kind": "c"}, "kind is 'c'; it must be one of a, b."),
        ({"kind": ["a"]}, "kind is ['a']; it must be one of a, b."),
        ({"side": "up"}, "side is 'up'; it must be one of left, right."),
        ({"color": "red"}, "color is 'red'; it must be a Color."),
        ({"part": {}}, "part is {}; it must be a Part or None."),
        ({"names": []}, "names is []; it must be a Mapping or None."),
        ({"windows": (1, 0)}, "windows[1] is 0; it must be from 1 to 9."),
        ({"windows": [1]}, "windows is [1]; it must be a tuple."),
        ({"pair": (1, 2, 3)}, "pair is (1, 2, 3); it must be a tuple of 2 elements."),
        ({"pair": (1, "2")}, "pair[1] is '2'; it must be an int, or None."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_value_is_refused_with_its_name_and_its_limits(changes, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        Options(**changes)


def test_a_choice_may_raise_another_error():
    with pytest.raises(Unsupported, match=r"^method is 'z'; this build has x, y\.$"):
        Options(method="z")


def test_a_numpy_number_that_is_refused_is_shown_with_its_type():
    with pytest.raises(InvalidInput, match=r"^at is np\.int64\(3\); it must be an int from 1 to 8\.$"):
        check_int("at", np.int64(3), 1, 8)


def test_a_checked_function_gets_its_arguments_as_they_are():
    assert described(8, 2, side="left", at=3) == (8, {"side": "left", "at": 3})
    from_numpy: dict[str, Any] = {"count": np.int64(3), "scale": np.float32(0.5), "dtype": np.int32(1)}
    assert described(**from_numpy, at=1) == (3, {"at": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": "8"}, "count is '8'; it must be an int from 1 to 8."),
        ({"count": 1, "scale": "1"}, "scale is '1'; it must be a finite number."),
        ({"count": 1, "even": 3}, "even is 3; it must be even."),
        ({"count": 1, "side": "up"}, "side is 'up'; it must be one of left, right."),
        ({"count": 1, "at": "end"}, "at is 'end'; it must be an int."),
    ],
    ids=str,
)
def test_an_argument_of_a_checked_function_is_refused(arguments, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        described(**arguments)


def test_the_signature_of_a_checked_function_lists_the_keywords_of_its_typed_dict():
    assert list(inspect.signature(described).parameters) == ["count", "scale", "even", "dtype", "side", "at"]


def test_a_keyword_that_a_checked_function_does_not_have_is_a_type_error_with_its_name():
    wrong: dict[str, Any] = {"wide": 3}
    with pytest.raises(TypeError, match=r"_fixed\(\) got an unexpected keyword argument 'wide'"):
        _fixed(1, **wrong)


def test_the_error_has_the_argument_and_the_value_as_fields():
    with pytest.raises(InvalidInput) as error:
        Options(count=9)
    assert (error.value.argument, error.value.value, error.value.wanted) == ("count", 9, "it must be from 1 to 8")


def test_a_prefix_stands_before_the_name_of_a_field():
    missing: Any = None
    with pytest.raises(InvalidInput, match=r"^outer\.size is None; it must be an int\.$"):
        check_fields(Part(size=missing), prefix="outer.")
