"""Text as it comes: whole characters only, stop strings found across tokens, nothing said twice."""

from __future__ import annotations

import pytest

from jattn.engine.detokenize import Detokenizer
from jattn.load import TextTokenizer
from tests.support.tiny_models import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(byte_tokenizer())


def pieces(tokenizer: TextTokenizer, text: str, *, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """Feeds one byte at a time, the last one as the end."""
    detokenizer = Detokenizer(tokenizer, stop)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = [detokenizer.push([token], finished=index == len(tokens) - 1) for index, token in enumerate(tokens)]
    return shown, detokenizer


def test_the_pieces_join_to_the_text(tokenizer) -> None:
    shown, detokenizer = pieces(tokenizer, "plain text")

    assert "".join(shown) == detokenizer.text == "plain text"


def test_a_character_of_several_tokens_appears_once_it_is_whole(tokenizer) -> None:
    shown, _ = pieces(tokenizer, "aé€b")

    assert shown == ["a", "", "é", "", "", "€", "b"]


def test_the_end_shows_what_is_left_of_a_broken_character(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    first_byte = tokenizer.encode("é", add_special_tokens=False)[0]

    assert detokenizer.push([first_byte]) == ""
    assert detokenizer.push([], finished=True) == "\N{REPLACEMENT CHARACTER}"


def test_text_is_cut_before_a_stop_string_that_spans_tokens(tokenizer) -> None:
    shown, detokenizer = pieces(tokenizer, "one END two", stop=("END",))

    assert "".join(shown) == detokenizer.text == "one "
    assert detokenizer.stopped


def test_what_could_become_a_stop_string_is_held_back_until_it_cannot(tokenizer) -> None:
    shown, detokenizer = pieces(tokenizer, "xENx", stop=("END",))

    assert shown == ["x", "", "", "ENx"]
    assert not detokenizer.stopped


def test_the_first_of_several_stop_strings_wins(tokenizer) -> None:
    _, detokenizer = pieces(tokenizer, "a.b!c", stop=("!", "."))

    assert detokenizer.text == "a"


def test_tokens_behind_a_stop_string_are_not_counted(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, (".",))

    assert detokenizer.push(tokenizer.encode("a.bc", add_special_tokens=False)) == "a"
    assert detokenizer.num_tokens == 2


def test_nothing_is_said_after_a_stop(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, (".",))
    detokenizer.push(tokenizer.encode("a.", add_special_tokens=False))

    assert detokenizer.push(tokenizer.encode("b", add_special_tokens=False), finished=True) == ""
    assert detokenizer.text == "a"
