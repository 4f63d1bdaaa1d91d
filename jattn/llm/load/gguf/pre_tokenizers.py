"""How a BPE vocabulary of a GGUF file cuts a text into words, by tokenizer.ggml.pre.

The patterns are those of the models' own tokenizer.json; llama.cpp has equal ones (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


def _cased(suffix: str) -> str:
    """Returns the pattern of words in which lower case follows upper case."""
    front = r"[^\r\n\p{L}\p{N}]?"
    return f"{front}{_UPPER}*{_LOWER}+{suffix}|{front}{_UPPER}+{_LOWER}*{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BpeKind:
    """A kind of BPE vocabulary.

    Attributes:
        patterns: regular expressions that cut a text, one after the other.
        ignores_merges: a word that is a token is not cut.
        adds_bos: a text begins with the token that starts a document, if the file does not say.
        is_nfc: texts are normalised to NFC.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


_OF_GPT2 = BpeKind(patterns=(_GPT2,))
_OF_LLAMA3 = BpeKind(patterns=(_LLAMA3,), ignores_merges=True, adds_bos=True)
_OF_QWEN2 = BpeKind(patterns=(_LLAMA3.replace("{1,3}", ""),), is_nfc=True)
_WITH_DIGITS = BpeKind(patterns=(r"\p{N}", _GPT2))
_OF_DBRX = BpeKind(patterns=(_LLAMA3,))

BPE_KINDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "granite-docling"), _OF_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _OF_DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r"), _WITH_DIGITS),
    "tekken": BpeKind(patterns=(rf"{_cased('')}|\p{{N}}|{_SIGNS}",), ignores_merges=True, adds_bos=True),
    "gpt-4o": BpeKind(patterns=(rf"{_cased(_SUFFIX + '?')}|\p{{N}}{{1,3}}|{_SIGNS}",)),
}
