"""Errors with fields: the message is built from them, and renaming changes a field."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from torch_core.base.checks import call_named, check_int, shown
from torch_core.base.errors import InvalidInput, JattnError, RequestTooLong, Unsupported


def test_the_message_is_argument_value_and_wanted() -> None:
    error = InvalidInput("top_p", value=3, wanted="it must be in (0, 1]")
    assert str(error) == "top_p is 3; it must be in (0, 1]."
    assert (error.argument, error.value, error.wanted) == ("top_p", 3, "it must be in (0, 1]")


def test_a_problem_stands_instead_of_the_value() -> None:
    error = Unsupported("suffix", "is given", "leave it out", value="x")
    assert str(error) == "suffix is given; leave it out."
    assert error.value == "x"


def test_a_problem_alone_is_a_sentence() -> None:
    assert str(InvalidInput("prompt", "is missing")) == "prompt is missing."


def test_a_plain_text_has_no_argument() -> None:
    error = InvalidInput("keys and values differ.")
    assert str(error) == "keys and values differ."
    assert (error.argument, error.root, error.wanted) == (None, None, None)


def test_renaming_changes_the_first_name_of_a_path() -> None:
    error = InvalidInput("prompt[3]", value=-1, wanted="it must be a token id").renamed("prompts[1]")
    assert str(error) == "prompts[1][3] is -1; it must be a token id."
    assert error.argument == "prompts[1][3]"


def test_a_whole_path_is_renamed_and_no_other() -> None:
    error = InvalidInput("encoder.num_heads[1]", "is missing")
    assert error.renamed("heads", old="encoder.num_heads").argument == "heads[1]"
    assert error.renamed("heads", old="encoder.num") is error
    assert error.renamed("heads", old="decoder") is error


def test_renaming_leaves_an_error_without_an_argument_alone() -> None:
    error = InvalidInput("keys and values differ.")
    assert error.renamed("prompts[1]") is error


def test_renaming_puts_the_new_name_before_a_text() -> None:
    error = RequestTooLong("this request needs 9 blocks.", argument="prompt").renamed("prompts[1]")
    assert type(error) is RequestTooLong
    assert str(error) == "prompts[1]: this request needs 9 blocks."


def test_places_stand_before_the_message_and_not_in_the_argument() -> None:
    error = InvalidInput(argument="head_dim", value=0, wanted="give it").under("encoder").under("config.json")
    assert str(error) == "config.json: encoder: head_dim is 0; give it."
    assert str(error.renamed("d_kv")) == "config.json: encoder: d_kv is 0; give it."
    assert error.argument == "head_dim"


def test_an_error_survives_pickling_with_its_fields() -> None:
    error = InvalidInput(argument="n[2]", value=0, wanted="it must be 1").renamed("best_of").under("body")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.argument, again.value) == (str(error), "best_of[2]", 0)
    assert str(again.renamed("n")) == "body: n[2] is 0; it must be 1."


@pytest.mark.parametrize("value", ["x" * 10_000, 1 << 10_000, object(), b"\xff" * 9999], ids=type)
def test_a_long_value_is_shortened(value: object) -> None:
    assert len(str(InvalidInput(argument="top_p", value=value, wanted="it must be a number"))) < 200


def test_a_value_that_cannot_be_printed_is_named_by_its_type() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown(Hostile()) == "a Hostile that cannot be printed"


def test_an_argument_that_a_caller_made_up_is_quoted_and_shortened() -> None:
    assert str(InvalidInput("a\nb", "is no field")) == "'a\\nb' is no field."
    assert len(str(InvalidInput("x" * 10_000, "is no field"))) < 200


@pytest.mark.parametrize("whole", [lambda ones: [*ones], lambda ones: (*ones,), lambda ones: {"a": {"b": [*ones]}}])
def test_no_more_of_a_long_value_is_printed_than_is_shown(whole) -> None:
    printed = []

    class One:
        def __repr__(self) -> str:
            printed.append(1)
            return "1"

    value = whole([One() for _ in range(1000)])

    text = shown(value)

    assert len(printed) <= 80
    assert text == f"{str(value)[:80]}..."


def test_numbers_of_numpy_are_shown_as_numbers() -> None:
    assert (shown(np.int32(5)), shown(np.float32(0.5)), shown(True)) == ("5", "0.5", "True")


def test_a_check_names_its_argument() -> None:
    with pytest.raises(JattnError, match=r"^n is 0; it must be an int of at least 1\.$") as caught:
        check_int("n", 0, 1)
    assert isinstance(caught.value, InvalidInput)
    assert (caught.value.argument, caught.value.value) == ("n", 0)


def test_a_wrong_call_names_the_public_function() -> None:
    def inner(query: int, *, scale: int = 1) -> int:
        return query * scale

    with pytest.raises(TypeError, match=r"^attend\(\) got an unexpected keyword argument 'scal'$"):
        call_named("attend", inner, 1, scal=2)  # pyright: ignore[reportCallIssue]


def test_a_type_error_from_inside_a_function_stays() -> None:
    def inner(query: int) -> int:
        raise TypeError("inner() is about something else")

    with pytest.raises(TypeError, match=r"^inner\(\) is about something else$"):
        call_named("attend", inner, 1)
