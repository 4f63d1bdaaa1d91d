"""Single tokens: their own bytes by every kind of vocabulary, and their places in a text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jattn.llm.load import TextTokenizer
from jattn.llm.text.tokens import TextOffsets, TokenBytes
from tests.engine.test_detokenize import fallback_tokenizer
from tests.support.tiny_models import byte_tokenizer


def tokenizer_of(names: list[str], decoder: Any, special: str | None = None) -> TextTokenizer:
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    if special is not None:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    return TextTokenizer(tokenizer)


LLAMA_2 = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    ("decoder", "names", "expected"),
    [
        (decoders.ByteLevel(), ["\u0120true", "\u00c3", "true"], [b" true", b"\xc3", b"true"]),
        (LLAMA_2, ["\u2581true", "true", "<0xE4>", "<0x0A>"], [b" true", b"true", b"\xe4", b"\n"]),
        (decoders.Metaspace(), ["\u2581true", "true", "\u4e2d"], [b" true", b"true", "\u4e2d".encode()]),
        (decoders.WordPiece(), ["true", "##ly"], [b" true", b"ly"]),
        (decoders.BPEDecoder(), ["true</w>", "tr"], [b"true ", b"tr"]),
        (None, ["true", "false"], [b" true", b" false"]),
        (decoders.CTC(word_delimiter_token="|"), ["t", "|"], [b"t", b" "]),
    ],
    ids=["byte level", "byte fallback", "metaspace", "wordpiece", "suffix", "no decoder", "unknown decoder"],
)
def test_a_token_has_the_bytes_that_it_adds_within_a_text(decoder, names, expected) -> None:
    tokens = TokenBytes(tokenizer_of(names, decoder))

    assert [tokens.of(token) for token in range(len(names))] == expected
    assert tokens.of(len(names)) == b""


@pytest.mark.parametrize(
    "make", [lambda: TextTokenizer(byte_tokenizer()), fallback_tokenizer], ids=["level", "fallback"]
)
@given(data=st.data())
def test_the_bytes_of_the_tokens_join_to_the_bytes_of_the_text(make, data) -> None:
    tokenizer = make()
    text = data.draw(st.text("ab\u00e9\u65e5\U0001f600 the"))
    tokens = TokenBytes(tokenizer)

    ids = tokenizer.encode(text, add_special_tokens=False)

    assert b"".join(map(tokens.of, ids)).decode().lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_a_part_of_a_character_is_spelled_by_its_bytes() -> None:
    names = ["\u0120\u00f0\u0141", "\u0120true", "\u0141"]
    tokens = TokenBytes(tokenizer_of(names, decoders.ByteLevel()))

    assert [tokens.text(token) for token in range(3)] == ["bytes: \\xf0\\x9f", " true", "bytes:\\x9f"]


def places(tokenizer: TextTokenizer, ids: list[int], text: str | None = None) -> list[int]:
    return TextOffsets(TokenBytes(tokenizer)).add(ids, tokenizer.decode(ids) if text is None else text)


def test_a_part_of_a_character_has_the_place_of_the_character() -> None:
    tokenizer = TextTokenizer(byte_tokenizer())

    found = places(tokenizer, tokenizer.encode("\u00e9\U0001f600\u4e2da"))

    assert found == [0, 0, 1, 1, 1, 1, 2, 2, 2, 3]


def test_places_count_no_space_that_the_decoder_dropped_and_no_special_token() -> None:
    tokenizer = tokenizer_of(["\u2581the", "\u2581cat", "s"], LLAMA_2, special="<s>")
    ids = [3, 0, 1, 3, 2]

    assert tokenizer.decode(ids) == "the cats"
    assert places(tokenizer, ids) == [0, 0, 3, 7, 7]
    # Behind a prompt the space stays; a prompt's own text may spell the special token.
    assert places(tokenizer, ids[1:], " the cats") == [0, 4, 8, 8]
    assert places(tokenizer, [3, 0], "<s>the") == [0, 3]


def test_places_of_a_text_that_comes_late_are_the_same() -> None:
    tokenizer = TextTokenizer(byte_tokenizer())
    ids = tokenizer.encode("a\u4e2db\u00e9c")
    offsets = TextOffsets(TokenBytes(tokenizer))

    one_by_one = [place for token in ids for place in offsets.add([token], "")]

    assert one_by_one == places(tokenizer, ids)


def test_places_in_a_text_that_a_normalizer_changed_go_on_behind_it() -> None:
    tokenizer = tokenizer_of(["a", "\u2581b"], LLAMA_2)
    tokenizer.tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()

    assert places(tokenizer, [0, 1, 0], "A Ba") == [0, 1, 3]
