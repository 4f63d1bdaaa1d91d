"""How few tokens a text can become: a bound that a tokenizer's parts give before it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from jattn.llm.load.text_growth import described_part, normalizer_growth

# Of the parts that lose no text. Unicode's canonical forms have at least a quarter of a text's characters and bytes.
_SHRINKS = {"NFC": 4, "NFD": 4}
_KEEPERS = {"ByteLevel", "Metaspace", "Digits"}
_BYTES = set(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True, slots=True)
class TextSizes:
    """How few tokens a text becomes.

    Attributes:
        longest: length of the longest piece of text that becomes one token: bytes of UTF-8 for a byte-level tokenizer,
            characters for others. 0 where a token may stand for a text of any length, or for none.
        in_bytes: whether `longest` counts bytes.
    """

    longest: int
    in_bytes: bool

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that no encoding of the text is below; 0 where none is known."""
        if not self.longest:
            return 0
        return -(-len(text.encode() if self.in_bytes else text) // self.longest)


def text_sizes(tokenizer: Tokenizer) -> TextSizes:
    """Returns the sizes that follow from a tokenizer's parts."""
    normalizers, splits = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    in_bytes = any(part["type"] == "ByteLevel" for part in splits)
    keeps_all = (
        all(map(_is_kept, normalizers))
        and all(part["type"] in _KEEPERS or part.get("behavior", "Removed") != "Removed" for part in splits)
        and not any(each.lstrip or each.rstrip for each in added)
        and _knows_all(tokenizer.model, vocabulary, in_bytes=in_bytes)
    )
    if not keeps_all:
        return TextSizes(0, in_bytes)
    # The normaliser's form of an added token may be longer than the token.
    growth = normalizer_growth(tokenizer)
    contents = (growth * len(each.content.encode() if in_bytes else each.content) for each in added)
    shrink = math.prod(_SHRINKS.get(part["type"], 1) for part in normalizers)
    return TextSizes(math.ceil(max((*map(len, vocabulary), *contents), default=0) * shrink), in_bytes)


def _parts(component: Any) -> list[dict[str, Any]]:
    """Returns a normaliser's or pre-tokenizer's parts as tokenizer.json has them."""
    if component is None:
        return []
    found, listed = [], [described_part(component)]
    while listed:
        part = listed.pop()
        inner = part.get("normalizers") or part.get("pretokenizers")
        if inner is None:
            found.append(part)
        else:
            listed += inner
    return found


def _is_kept(part: Mapping[str, Any]) -> bool:
    """Returns whether a normaliser's part shortens no text, or by a known factor."""
    if part["type"] == "Replace":
        longer, shorter = part["content"], part["pattern"].get("String", "")
        return bool(shorter) and len(longer) >= len(shorter) and len(longer.encode()) >= len(shorter.encode())
    return part["type"] == "Prepend" or part["type"] in _SHRINKS


def _knows_all(model: Any, vocabulary: Mapping[str, int], *, in_bytes: bool) -> bool:
    """Returns whether a model makes a token of each character that it has no other token for, and drops none."""
    if type(model).__name__ != "BPE":
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    return (in_bytes and vocabulary.keys() >= _BYTES) or (
        model.byte_fallback and {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys()
    )
