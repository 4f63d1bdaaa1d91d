"""Text as it comes: whole characters only, stop strings found across tokens, nothing said twice."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from jattn.llm.load import TextTokenizer
from jattn.llm.text.detokenize import Detokenizer
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
    assert detokenizer.stop_string == "END"


def test_what_could_become_a_stop_string_is_held_back_until_it_cannot(tokenizer) -> None:
    shown, detokenizer = pieces(tokenizer, "xENx", stop=("END",))

    assert shown == ["x", "", "", "ENx"]
    assert detokenizer.stop_string is None


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


def fallback_tokenizer() -> TextTokenizer:
    """Words with a mark for the space before them, and a token for each byte that no word has: Llama's scheme."""
    words = ["\u2581a", "\u2581the", "b", "\u00e9", "\u65e5", "\ufffd"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(tokenizer)


def ids_of(tokenizer: TextTokenizer, *names: str) -> list[int]:
    ids = [tokenizer.tokenizer.token_to_id(name) for name in names]
    return [token for token in ids if token is not None]


def test_a_character_of_fallback_bytes_appears_once_it_is_whole() -> None:
    tokenizer = fallback_tokenizer()
    detokenizer = Detokenizer(tokenizer)

    shown = [detokenizer.push([token]) for token in ids_of(tokenizer, "\u2581a", "<0xC3>", "<0xA9>", "\u2581the")]

    assert shown == ["a", "", "\u00e9", " the"]


def test_a_word_behind_a_prompt_keeps_its_space() -> None:
    tokenizer = fallback_tokenizer()
    words = ids_of(tokenizer, "\u2581the", "\u2581a")

    assert Detokenizer(tokenizer, prompt=words).push(words) == " the a"
    assert Detokenizer(tokenizer).push(words) == "the a"


@pytest.mark.parametrize("before", ["", "a long text before it: ", "\N{REPLACEMENT CHARACTER}" * 30])
@pytest.mark.parametrize("character", ["\u20ac", "\U0001f600"])
def test_a_character_that_the_prompt_begins_and_the_output_ends_is_whole(tokenizer, before, character) -> None:
    *prompt, last = tokenizer.encode(before + character, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt=prompt)

    assert detokenizer.push([last]) == character
    assert detokenizer.num_tokens == 1


def test_what_is_broken_at_the_end_of_a_prompt_is_no_part_of_the_text(tokenizer) -> None:
    begun = tokenizer.encode("a\u20ac", add_special_tokens=False)[:-1]

    assert Detokenizer(tokenizer, prompt=begun).push(tokenizer.encode("b", add_special_tokens=False)) == "b"
    assert Detokenizer(tokenizer, prompt=begun).push([], finished=True) == ""


def test_bytes_that_can_become_no_character_are_replaced_and_the_text_goes_on() -> None:
    tokenizer = fallback_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    # The library's stream raises at "b": "o" was given out, and bytes that are no UTF-8 turn all of their run into
    # replacement characters.
    tokens = ids_of(tokenizer, "\u2581the", "<0x6F>", "<0xF9>", "<0xA9>", "b", "\u2581a")

    shown = [detokenizer.push([token]) for token in tokens]

    assert "".join(shown) == detokenizer.text
    assert shown[:2] == ["the", "o"]
    assert detokenizer.text.endswith("b a")
    assert "\N{REPLACEMENT CHARACTER}" in detokenizer.text


@pytest.mark.parametrize("make", [lambda: TextTokenizer(byte_tokenizer()), fallback_tokenizer], ids=["bytes", "words"])
def test_any_tokens_in_any_pieces_give_the_same_text_and_never_an_error(make, seed) -> None:
    tokenizer = make()
    choose = random.Random(seed)
    for _ in range(300):
        tokens = [choose.randrange(tokenizer.vocab_size) for _ in range(choose.randrange(1, 24))]
        one_by_one, at_once = Detokenizer(tokenizer), Detokenizer(tokenizer)

        shown = [one_by_one.push([token]) for token in tokens] + [one_by_one.push([], finished=True)]
        cut = choose.randrange(len(tokens) + 1)
        pieces = [at_once.push(tokens[:cut]), at_once.push(tokens[cut:], finished=True)]

        assert "".join(shown) == "".join(pieces) == one_by_one.text
        assert one_by_one.num_tokens == at_once.num_tokens == len(tokens)


def test_valid_text_is_what_decoding_all_of_it_gives(tokenizer, seed) -> None:
    choose = random.Random(seed)
    for _ in range(100):
        text = "".join(choose.choice("a b\u00e9\u65e5\U0001f389\ufffd\n") for _ in range(20))

        shown, detokenizer = pieces(tokenizer, text)

        assert "".join(shown) == detokenizer.text == text
