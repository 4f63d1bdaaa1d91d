"""Tokenizers of other libraries as a `TextTokenizer`: transformers', sentencepiece's, and those of `tokenizers`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from jattn.llm.load.tokenizer import TextTokenizer
from torch_core.base.checks import shown
from torch_core.base.errors import InvalidInput, Unsupported

_SPACE = "▁"


def as_text_tokenizer(tokenizer: Any) -> TextTokenizer | None:
    """Returns a tokenizer of a known library as the engine needs it; None for None.

    Args:
        tokenizer: a `TextTokenizer`, `tokenizers.Tokenizer`, `transformers.PreTrainedTokenizerFast`, a slow tokenizer
            of transformers that it can convert, or `sentencepiece.SentencePieceProcessor`. Later changes of it have no
            effect, but on the text of a sentencepiece processor's encoder.

    Raises:
        InvalidInput: it is none of these.
        Unsupported: a slow tokenizer that transformers does not convert.
    """
    if tokenizer is None or isinstance(tokenizer, TextTokenizer):
        return tokenizer
    if isinstance(tokenizer, Tokenizer):
        return TextTokenizer(_plain(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return _of_transformers(backend, tokenizer)
    if all(callable(getattr(tokenizer, name, None)) for name in ("id_to_piece", "is_control", "encode")):
        return SentencePieceTokenizer(tokenizer)
    if any(each.__module__.partition(".")[0] == "transformers" for each in type(tokenizer).__mro__):
        return _of_transformers(_converted(tokenizer), tokenizer)
    wanted = (
        "it must be a jattn.llm.load.TextTokenizer, a tokenizer of tokenizers or of transformers, a "
        "sentencepiece.SentencePieceProcessor, or None"
    )
    raise InvalidInput("tokenizer", value=tokenizer, wanted=wanted)


class SentencePieceTokenizer(TextTokenizer):
    """Encodes by a sentencepiece processor, and decodes by its pieces.

    Args:
        processor: the `SentencePieceProcessor`; its own options say whether it adds a first and a last token.
    """

    def __init__(self, processor: Any) -> None:
        pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
        # It only decodes: no text reaches the model.
        scores = [(piece, 0.0) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=max(processor.unk_id(), 0), byte_fallback=False))
        parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if str(processor.encode("a", out_type=str)[0]).startswith(_SPACE):
            parts.append(decoders.Strip(content=" ", left=1, right=0))
        tokenizer.decoder = decoders.Sequence(parts)
        special = [piece for index, piece in enumerate(pieces) if processor.is_control(index)]
        tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
        super().__init__(tokenizer, special_tokens=_named(processor, pieces))
        self._processor = processor

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None, cut: bool = False
    ) -> list[int]:
        """Returns the token ids of the text; see `TextTokenizer.encode`. `most` and `cut` are left to the engine."""
        if not isinstance(text, str):
            raise InvalidInput("prompt", value=text, wanted="it must be text")
        options: dict[str, Any] = {} if add_special_tokens else {"add_bos": False, "add_eos": False}
        try:
            return list(self._processor.encode(text, out_type=int, **options))
        except (UnicodeError, RuntimeError, ValueError) as error:
            raise InvalidInput(f"the tokenizer cannot encode the text: {error}.", argument="prompt") from None

    def within(self, vocab_size: int) -> TextTokenizer:
        """Returns itself, if all its pieces are below vocab_size."""
        if self.vocab_size > vocab_size:
            raise InvalidInput("tokenizer", f"has token ids up to {self.vocab_size - 1}", f"vocab_size is {vocab_size}")
        return self


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy that neither cuts nor pads."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _of_transformers(backend: Tokenizer, tokenizer: Any) -> TextTokenizer:
    template = getattr(tokenizer, "chat_template", None)
    named = template if isinstance(template, Mapping) else {"default": template}
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextTokenizer(_plain(backend), named.get("default"), special, named.get("tool_use"))


def _converted(tokenizer: Any) -> Tokenizer:
    try:
        return importlib.import_module("transformers.convert_slow_tokenizer").convert_slow_tokenizer(tokenizer)
    except Exception as error:
        problem = f"is a {type(tokenizer).__name__}, which transformers does not convert ({shown(str(error))})"
        raise Unsupported("tokenizer", problem, "give its fast tokenizer") from None


def _named(processor: Any, pieces: list[str]) -> dict[str, str]:
    ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "unk_token": processor.unk_id()}
    return {name: pieces[index] for name, index in ids.items() if index >= 0}
