"""Turns tokens into text as they come, never in the middle of a character, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tokenizers.decoders import DecodeStream

from jattn.llm.load import TextTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of a prompt that are read before the text, as many as vLLM reads.
_FEWEST_OF_PROMPT, _MOST_OF_PROMPT = 4, 24


class Detokenizer:
    """Decodes one request's output incrementally.

    The library's `DecodeStream` does it, except for two cases: the rest of a broken character at the end, and bytes
    that can never become a character, for which it raises. Text that might still turn out to be the start of a stop
    string is held back.

    Args:
        tokenizer: tokenizer of the model.
        stop: strings that end the text, before them or, with `include_stop`, after them.
        prompt: the tokens before: they decide about a space before the first new token, and may end within a character.
        min_tokens: tokens in whose text no stop string counts.

    Attributes:
        text: everything decoded so far, cut at a stop string.
        num_tokens: tokens read so far; those after a stop string are not.
        stop_string: the stop string that was found, or None.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        # The last token that gave text, and those since then.
        self._unread: list[int] = []
        self._num_context = 0
        self._of_prompt = ""
        self._handed_out = 0
        self.text = ""
        self._decode(self._end_of(prompt), finished=False)
        # The stream returns a broken character once it is complete, together with the text after it.
        self._of_prompt = self._rest()
        self.num_tokens = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int], *, finished: bool = False) -> str:
        """Adds tokens and returns the text that is now certain and was not returned before.

        With `finished` no more will come, so nothing is held back.
        """
        if self.stop_string is not None:
            return ""
        if not self._stop:
            self.num_tokens += len(token_ids)
            new = self._decode(token_ids, finished)
            self.text += new
            return new
        # One at a time, because each of them may end the text.
        parts = [(token,) for token in token_ids] or [()]
        for index, part in enumerate(parts, 1):
            searched = len(self.text)
            self.num_tokens += len(part)
            self.text += self._decode(part, finished and index == len(parts))
            if self._cut(searched):
                break
        end = len(self.text) if finished or self.stop_string is not None else len(self.text) - self._held_back()
        new = self.text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return new

    def _end_of(self, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the last tokens of a prompt, from the beginning of a character on."""
        for count in range(_FEWEST_OF_PROMPT, _MOST_OF_PROMPT):
            some = prompt[-count:]
            if len(some) < count or _REPLACEMENT not in self._tokenizer.decode(some):
                return some
        return prompt[-_MOST_OF_PROMPT:]

    def _decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """Returns the text that tokens complete, with `finished` also that of a broken character."""
        text, tokenizer = "", self._tokenizer.tokenizer
        for token in token_ids:
            self._unread.append(token)
            try:
                new = self._stream.step(tokenizer, token)
            except Exception:
                # The library's own class is plain Exception. The bytes before this token can become no character.
                new = self._rest()
                self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
                self._stream.step(tokenizer, token)
            if new is not None:
                text += self._behind_prompt(new) if self._of_prompt else new
                self._unread, self._num_context = [token], 1
        if finished:
            text += self._behind_prompt(self._rest())
        return text

    def _behind_prompt(self, new: str) -> str:
        """Returns the first text without the prompt's last characters, which it may have changed."""
        known, self._of_prompt = self._of_prompt, ""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(known, new, strict=False))
        return new[sum(1 for _ in same) :]

    def _rest(self) -> str:
        """Decodes the tokens that the stream has not returned yet; the token before decides about a space."""
        skip = self._skip_special_tokens
        known = self._tokenizer.decode(self._unread[: self._num_context], skip_special_tokens=skip)
        return self._tokenizer.decode(self._unread, skip_special_tokens=skip)[len(known) :]

    def _cut(self, searched: int) -> bool:
        """Cuts the text at the first stop string that ends after the characters that were searched before, if any."""
        if self.num_tokens <= self._min_tokens:
            return False
        places = [(self.text.find(stop, max(searched + 1 - len(stop), 0)), stop) for stop in self._stop]
        found = [place for place in places if place[0] >= 0]
        if found:
            at, self.stop_string = min(found)
            self.text = self.text[: at + len(self.stop_string) * self._include_stop]
        return bool(found)

    def _held_back(self) -> int:
        """Returns how many of the last characters may be the beginning of a stop string."""
        text, first = self.text, len(self.text)
        for stop in self._stop:
            at = text.find(stop[0], max(len(text) + 1 - len(stop), 0), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first = at
                at = text.find(stop[0], at + 1, first)
        return len(text) - first
