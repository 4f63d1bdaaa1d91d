"""Long texts to token ids and back, by tokenizers that the process keeps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer

_tokenizers: dict[str, Tokenizer] = {}


def keep(names: Sequence[str], described: str) -> bytes:
    """Keeps a tokenizer, given as the text of its tokenizer.json, by the last of the names, and forgets all others."""
    added = Tokenizer.from_str(described)
    for name in _tokenizers.keys() - names:
        del _tokenizers[name]
    _tokenizers[names[-1]] = added
    return b""


def encode(name: str, text: str, add_special_tokens: bool, kept: int | None) -> bytes:
    """Returns the token ids of a text as uint32, all of them or the last `kept`."""
    ids = _tokenizers[name].encode(text, add_special_tokens=add_special_tokens).ids
    return array("I", ids if kept is None else ids[-kept:]).tobytes()


def decode(name: str, token_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
    """Returns the text of token ids."""
    return _tokenizers[name].decode(token_ids, skip_special_tokens=skip_special_tokens).encode()
