"""Bad words: the tokens that would complete a text that must not be generated, found by bytes."""

from __future__ import annotations

import codecs
import functools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from jattn.llm.engine.options.params import MAX_BAD_WORD_BYTES, SamplingParams
from jattn.llm.engine.request.grammar import mask_of
from jattn.llm.load import TextTokenizer
from jattn.llm.text.tokens import TokenBytes

_MOST_MASKS = 64
# Bytes of a character that lacks one.
_MOST_BEGUN = 3
_MOST_KNOWN = 16


class BadWords:
    """Texts that no output contains, whatever tokens they could come by. Requests share it.

    Args:
        words: the texts in UTF-8.
        tokens: tokens of the vocabulary.
        ends: tokens that end a text and are no part of it; they are always allowed.
        num_words: number of words of a mask.

    Attributes:
        end: int32[num_words], the mask of the tokens that end a text; of all tokens if there are none.
    """

    def __init__(self, words: Sequence[bytes], tokens: _SortedTokens, ends: Sequence[int], num_words: int) -> None:
        self._tokens, self._num_words = tokens, num_words
        self._ends = mask_of(list(ends), num_words)
        self.end = self._ends if ends else ~self._ends
        self._longest = max(map(len, words))
        # By the beginning of a word, its rests.
        self._rests: dict[bytes, list[bytes]] = {}
        for word in words:
            for size in range(1, len(word)):
                self._rests.setdefault(word[:size], []).append(word[size:])
        self._never = mask_of(np.concatenate([tokens.containing(word) for word in words]), num_words)
        self._masks: dict[tuple[bytes, ...], np.ndarray] = {}

    def allowed(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> np.ndarray:
        """Returns int32[num_words], a bit for each token with which the output contains none of the texts.

        A character that the prompt begins is the output's.
        """
        tail = self._tail(prompt_token_ids, output_token_ids)
        sizes = range(1, min(len(tail), self._longest - 1) + 1)
        rests = tuple(rest for size in sizes for rest in self._rests.get(tail[-size:], ()))
        if rests not in self._masks:
            if len(self._masks) == _MOST_MASKS:
                self._masks.clear()
            banned = [token for rest in rests for token in self._tokens.beginning_with(rest)]
            self._masks[rests] = self._ends | ~(self._never | mask_of(banned, self._num_words))
        return self._masks[rests]

    def _tail(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> bytes:
        """Returns the last bytes of the output, as many as a word may have begun with."""
        tail = b""
        for token in reversed(output_token_ids):
            if len(tail) >= self._longest - 1:
                return tail
            tail = self._tokens.of(token) + tail
        end = b"".join(map(self._tokens.of, prompt_token_ids[-_MOST_BEGUN:]))[-_MOST_BEGUN:]
        # Bytes that are no whole character yet stay in the decoder.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(end)
        return decoder.getstate()[0] + tail


class BadWordsFinder:
    """Finds the tokens of bad words in a model's vocabulary. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: vocabulary size of the model.
        eos_token_ids: ids of the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        # The last ones: many requests bring the same.
        self._known = functools.lru_cache(_MOST_KNOWN)(self._find)
        self._sorted = functools.lru_cache(2)(self._sort)

    def find(self, params: SamplingParams) -> BadWords:
        """Returns the bad words of a request that has some."""
        # A text with white space in front contains the one without.
        texts = {(word.lstrip() or word).encode() for word in params.bad_words}
        # The token that ends a text is usually no part of it.
        has_end = params.ignore_eos or params.include_stop_str_in_output
        return self._known(tuple(sorted(texts)), params.skip_special_tokens, () if has_end else self._eos_token_ids)

    def _find(self, words: tuple[bytes, ...], skip_special_tokens: bool, ends: tuple[int, ...]) -> BadWords:
        return BadWords(words, self._sorted(skip_special_tokens), ends, -(-self._vocab_size // 32))

    def _sort(self, skip_special_tokens: bool) -> _SortedTokens:
        return _SortedTokens(TokenBytes(self._tokenizer), self._vocab_size, skip_special_tokens)


class _SortedTokens:
    """The bytes of a vocabulary's tokens, in order."""

    def __init__(self, tokens: TokenBytes, vocab_size: int, skip_special_tokens: bool) -> None:
        left_out = tokens.special_token_ids if skip_special_tokens else ()
        self._bytes = [b"" if token in left_out else tokens.of(token) for token in range(vocab_size)]
        self._order = sorted(range(vocab_size), key=self._bytes.__getitem__)
        self._sorted = [self._bytes[token] for token in self._order]
        # A byte that no UTF-8 has lies between two tokens, and after the last as often as a word has bytes.
        self._joined = np.frombuffer(b"\xff".join(self._bytes) + b"\xff" * MAX_BAD_WORD_BYTES, np.uint8)
        self._starts = np.cumsum([0, *(len(own) + 1 for own in self._bytes)])

    def of(self, token: int) -> bytes:
        return self._bytes[token]

    def beginning_with(self, start: bytes) -> list[int]:
        """Returns the tokens that begin with UTF-8 bytes, of which none is the largest byte."""
        behind = start[:-1] + bytes([start[-1] + 1])
        return self._order[bisect_left(self._sorted, start) : bisect_left(self._sorted, behind)]

    def containing(self, part: bytes) -> np.ndarray:
        """Returns int[tokens], those that contain UTF-8 bytes; a loop over the vocabulary takes ten times as long."""
        places = np.flatnonzero(self._joined == part[0])
        for offset, byte in enumerate(part[1:], 1):
            places = places[self._joined[places + offset] == byte]
        return np.searchsorted(self._starts, places, side="right") - 1
