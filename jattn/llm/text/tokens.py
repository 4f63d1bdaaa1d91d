"""Single tokens: the bytes that each adds to a text, their spelling in answers, their places in a text."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jattn.llm.load import TextTokenizer

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token, from the vocabulary and the tokenizer's decoder.

    They are those that the token adds within a text: `▁true` of a sentencepiece vocabulary is " true", also if a
    decoder drops the space at the beginning of a text, and a part of a character is its UTF-8 bytes.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.tokenizer.decoder
        # Pickle's protocol is the library's only way to say what a decoder is, short of writing the whole vocabulary.
        described = {"type": None} if decoder is None else json.loads(decoder.__getstate__())  # type: ignore[attr-defined]
        self._steps = _steps(described)

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that decoding leaves out with `skip_special_tokens`."""
        added = self._tokenizer.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def of(self, token_id: int) -> bytes:
        """Returns the bytes of a token; none for an id that the tokenizer does not have."""
        piece: str | None = self._tokenizer.tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._steps is None:
            return self._tokenizer.decode_plainly([token_id]).encode()
        for step in self._steps:
            found = step(piece)
            if isinstance(found, bytes):
                return found
            piece = found
        return piece.encode()

    def text(self, token_id: int) -> str:
        r"""Returns the text of a token; bytes that are no whole characters have OpenAI's spelling, `bytes:\xf0\x9f`."""
        found = self.of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return f"bytes:{found.decode(errors='backslashreplace')}"


class TextOffsets:
    """Finds where the tokens of a text begin, in characters, as they come.

    A token that begins within a character has that character's place. A special token that the text leaves out has the
    place of the next one. Behind a stop string, where the text is cut, places go on.

    Args:
        tokens: bytes of the tokens.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._at = "", 0

    def add(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Returns the places of further tokens.

        Args:
            token_ids: the tokens.
            text: the text that came with them; it may lack the text of the last ones, which comes with later tokens.
        """
        self._text += text
        places = []
        for token_id in token_ids:
            places.append(self._at)
            self._at += self._num_characters(token_id)
        return places

    def begin(self, text: str) -> None:
        """Sets the place of the next token to the end of a text, whose tokens were added."""
        self._text, self._at = text, len(text)

    def _num_characters(self, token_id: int) -> int:
        own, at = self._tokens.of(token_id), self._at
        is_special = token_id in self._tokens.special_token_ids
        if is_special and not self._text.startswith(own.decode(errors="replace"), at):
            return 0
        new = self._decoder.decode(own)
        shown = self._text[at : at + len(new)]
        if new.startswith(shown):
            return len(new)
        # A decoder may drop the space at the beginning of a text.
        without_space = new.removeprefix(" ")
        return len(without_space if without_space.startswith(shown[: len(without_space)]) else new)


def _steps(described: Mapping[str, Any]) -> list[Callable[[str], str | bytes]] | None:
    """Returns the functions that a decoder applies to a token within a text; None if it has others."""
    steps: list[Callable[[str], str | bytes]] = []
    is_fused = False
    for part in described["decoders"] if described["type"] == "Sequence" else [described]:
        kind = part["type"]
        if kind == "Fuse" or (kind == "Strip" and is_fused):
            # All that follows concerns the ends of the text.
            is_fused = True
        elif kind == "Replace" and "String" in part["pattern"]:
            steps.append(functools.partial(_replaced, old=part["pattern"]["String"], new=part["content"]))
        elif kind in _STEPS:
            steps.append(_STEPS[kind](part))
        else:
            return None
    return steps


def _replaced(piece: str, old: str, new: str) -> str:
    return piece.replace(old, new)


def _of_characters(piece: str) -> bytes:
    found = [_BYTE_OF.get(character) for character in piece]
    # Added tokens are no such characters.
    return piece.encode() if None in found else bytes(found)  # type: ignore[arg-type]


def _of_fallback(piece: str) -> str | bytes:
    found = _FALLBACK.fullmatch(piece)
    return piece if found is None else bytes.fromhex(found[1])


def _behind_prefix(piece: str, prefix: str) -> str:
    return piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"


def _byte_of_each_character() -> dict[str, int]:
    """Returns GPT-2's alphabet: a visible character is its own byte, the others follow from 256 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted({*range(256)}.difference(own))
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of_each_character()
_STEPS: dict[str | None, Callable[[Mapping[str, Any]], Callable[[str], str | bytes]]] = {
    # Without a decoder, tokens are joined by spaces.
    None: lambda part: " {}".format,
    "ByteLevel": lambda part: _of_characters,
    "ByteFallback": lambda part: _of_fallback,
    "Metaspace": lambda part: functools.partial(_replaced, old=part["replacement"], new=" "),
    "BPEDecoder": lambda part: functools.partial(_replaced, old=part["suffix"], new=" "),
    "WordPiece": lambda part: functools.partial(_behind_prefix, prefix=part["prefix"]),
}
