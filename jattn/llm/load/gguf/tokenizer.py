"""The tokenizer of a GGUF file: a `tokenizers` tokenizer from the vocabulary in its metadata."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jattn.llm.load.gguf.metadata import Metadata
from jattn.llm.load.gguf.pre_tokenizers import BPE_KINDS
from jattn.llm.load.tokenizer import TextTokenizer, tokenizer_failures
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

_MODEL, _TOKENS, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.pre"
_TEMPLATE = "tokenizer.chat_template"
#: Kinds of tokens in tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
#: Characters of a token that merges can make; sentencepiece's own limit is 16, and Gemma has 31 spaces.
_LONGEST = 64
_SPECIAL = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"
}  # fmt: skip
_ENDS = ("eos", "eot", "eom")
#: Control tokens that end an answer even if no key of the file says so, as in llama.cpp.
_END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)


def end_ids(metadata: Metadata) -> tuple[int, ...]:
    """Returns the tokens that end a generation."""
    named = [metadata.number(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    tokens, kinds = metadata.texts(_TOKENS), _kinds(metadata)
    ends = [index for index in np.flatnonzero(kinds == _CONTROL).tolist() if tokens[index] in _END_TEXTS]
    return tuple(dict.fromkeys(index for index in (*named, *ends) if index is not None))


def tokenizer_of_gguf(metadata: Metadata, pre_tokenizer: str | None) -> TextTokenizer:
    """Returns the tokenizer with the file's chat templates.

    Args:
        metadata: the file's metadata.
        pre_tokenizer: kind of a BPE vocabulary whose file does not name one; None if it must.

    Raises:
        InvalidInput: a vocabulary that is missing or contradicts itself.
        Unsupported: a kind of vocabulary that this build does not read.
    """
    kind, tokens = metadata.text(_MODEL, None), metadata.texts(_TOKENS)
    if kind is None or not tokens:
        raise InvalidInput(_TOKENS if kind else _MODEL, "is missing", "load the model without its tokenizer")
    kinds = _kinds(metadata)
    special = {name: _special(metadata, part, tokens) for name, part in _SPECIAL.items()}
    special = {name: text for name, text in special.items() if text is not None}
    with tokenizer_failures("the vocabulary makes no tokenizer"):
        if kind == "gpt2":
            tokenizer, adds_bos = _bpe(metadata, tokens, pre_tokenizer)
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(metadata, tokens, kinds), True
        else:
            raise Unsupported(_MODEL, value=kind, wanted="this build reads gpt2 and llama")
        added = [
            AddedToken(tokens[index], special=kinds[index] != _USER_DEFINED, normalized=False)
            for index in np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
            if tokens[index]
        ]
        tokenizer.add_tokens(added)
        _add_ends(tokenizer, metadata, tokens, adds_bos=adds_bos)
    return TextTokenizer(tokenizer, metadata.text(_TEMPLATE), special, metadata.text(f"{_TEMPLATE}.tool_use"))


def _kinds(metadata: Metadata) -> np.ndarray:
    """Returns the kind of each token."""
    tokens, kinds = metadata.texts(_TOKENS), metadata.array("tokenizer.ggml.token_type", "iu")
    if kinds is None:
        return np.full(len(tokens), _NORMAL)
    if len(kinds) != len(tokens):
        wanted = f"{_TOKENS} has {len(tokens)}, and each has a type"
        raise InvalidInput("tokenizer.ggml.token_type", f"has {len(kinds)} elements", wanted)
    return kinds


def _special(metadata: Metadata, part: str, tokens: Sequence[str]) -> str | None:
    index = metadata.number(f"tokenizer.ggml.{part}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        wanted = f"it must be a token id from 0 to {len(tokens) - 1}"
        raise InvalidInput(f"tokenizer.ggml.{part}_token_id", value=index, wanted=wanted)
    return tokens[index]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Returns ids by text; the first of equal texts."""
    return {text: index for index, text in reversed(list(enumerate(tokens)))}


def _bpe(metadata: Metadata, tokens: Sequence[str], default: str | None) -> tuple[Tokenizer, bool]:
    named = metadata.text(_PRE, None)
    name = default if named in (None, "default") else named
    if name not in BPE_KINDS:
        problem = "is missing" if name is None else f"is {shown(name)}"
        raise Unsupported(_PRE, problem, f"this build reads {', '.join(sorted(BPE_KINDS))}")
    kind, merges = BPE_KINDS[name], []
    for index, merge in enumerate(metadata.texts("tokenizer.ggml.merges")):
        first, _, second = merge.partition(" ")
        if not first or not second:
            raise InvalidInput(f"tokenizer.ggml.merges[{index}]", value=merge, wanted="it must be two tokens")
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=kind.ignores_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in kind.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if kind.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], kinds: np.ndarray) -> Tokenizer:
    scores = metadata.array("tokenizer.ggml.scores", "f")
    if scores is None or len(scores) != len(tokens):
        count = "is missing" if scores is None else f"has {len(scores)} elements"
        raise InvalidInput("tokenizer.ggml.scores", count, f"{_TOKENS} has {len(tokens)}, and each has a score")
    vocabulary = _vocabulary(tokens)
    unknown = _special(metadata, "unknown", tokens)
    merged = np.flatnonzero(np.isin(kinds, (_NORMAL, _USER_DEFINED))).tolist()
    merges = list(_merges(tokens, vocabulary, scores, merged))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if has_prefix else back)
    return tokenizer


def _merges(
    tokens: Sequence[str], vocabulary: dict[str, int], scores: np.ndarray, merged: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yields the pairs of tokens that make a third: those of the highest score first.

    sentencepiece merges the neighbours whose token has the highest score (Kudo and Richardson 2018, arXiv:1808.06226).
    """
    order = sorted(merged, key=lambda index: -scores[index])
    for text in (tokens[index] for index in order):
        if 1 < len(text) <= _LONGEST:
            cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
            yield from sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str], *, adds_bos: bool) -> None:
    """Adds the tokens before and after each text."""
    wanted = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    ends = {part: metadata.number(f"tokenizer.ggml.{part}_token_id") for part in wanted if wanted[part]}
    texts = {part: tokens[index] for part, index in ends.items() if index is not None}
    if texts:
        single = list(itertools.chain([texts.get("bos")], ["$A"], [texts.get("eos")]))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[piece for piece in single if piece is not None],
            special_tokens=[(text, ends[part]) for part, text in texts.items()],
        )
