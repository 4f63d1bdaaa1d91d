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
        self._of_prompt, self.text = self._rest(), ""
        self.num_tokens = 0
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int], *, finished: bool = False) -> str:
        """Adds tokens and returns the text that is now certain and was not returned before.

        With `finished` no more will come, so nothing is held back.
        """
        if self.stopped:
            return ""
        # One at a time where one of them may end the text; at once is cheaper.
        parts = [(token,) for token in token_ids] if self._stop and token_ids else [tuple(token_ids)]
        for index, part in enumerate(parts):
            searched = len(self.text)
            self.num_tokens += len(part)
            self._decode(part, finished and index == len(parts) - 1)
            self._cut(searched)
            if self.stopped:
                break
        end = len(self.text) if finished or self.stopped else len(self.text) - self._held_back()
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

    def _decode(self, token_ids: Sequence[int], finished: bool) -> None:
        tokenizer = self._tokenizer.tokenizer
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
                self._add(new)
                self._unread, self._num_context = [token], 1
        if finished:
            self._add(self._rest())

    def _add(self, new: str) -> None:
        known, self._of_prompt = self._of_prompt, ""
        if not known:
            self.text += new
            return
        # The new text may have changed the prompt's last characters.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(known, new, strict=False))
        self.text += new[sum(1 for _ in same) :]

    def _rest(self) -> str:
        """Decodes the tokens that the stream has not returned yet; the token before decides about a space."""
        skip = self._skip_special_tokens
        known = self._tokenizer.decode(self._unread[: self._num_context], skip_special_tokens=skip)
        return self._tokenizer.decode(self._unread, skip_special_tokens=skip)[len(known) :]

    def _cut(self, searched: int) -> None:
        """Cuts the text at the first stop string that ends behind the characters that were searched before."""
        if not self._stop or self.num_tokens <= self._min_tokens:
            return
        places = [(self.text.find(stop, max(searched + 1 - len(stop), 0)), stop) for stop in self._stop]
        found = [place for place in places if place[0] >= 0]
        if found:
            at, self.stop_string = min(found)
            self.text = self.text[: at + len(self.stop_string) * self._include_stop]

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
