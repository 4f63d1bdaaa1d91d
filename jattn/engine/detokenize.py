"""Turns tokens into text as they come, never in the middle of a character, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from jattn.load import TextTokenizer

__all__ = ["Detokenizer"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes one request's output incrementally.

    Each new token is decoded together with the few before it, as a token's text can depend on its neighbours and a
    character can span tokens; the method of transformers' streamer and vLLM's detokenizer. Text that might still turn
    out to be the start of a stop string is held back.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.

    Attributes:
        text: everything decoded so far, cut before a stop string.
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._handed_out = 0
        self.text = ""
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens read so far; those behind a stop string are not."""
        return len(self._token_ids)

    def push(self, token_ids: Sequence[int], *, finished: bool = False) -> str:
        """Adds tokens and returns the text that is now certain and was not returned before.

        Args:
            token_ids: new tokens.
            finished: no more will come, so nothing is held back.
        """
        if self.stopped:
            return ""
        # One at a time where one of them may end the text; at once is cheaper.
        parts = [(token,) for token in token_ids] if self._stop and token_ids else [tuple(token_ids)]
        for index, part in enumerate(parts):
            self._decode(part, finished and index == len(parts) - 1)
            self._cut()
            if self.stopped:
                break
        end = len(self.text) if finished or self.stopped else len(self.text) - self._held_back()
        new = self.text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return new

    def _decode(self, token_ids: Sequence[int], finished: bool) -> None:
        self._token_ids += token_ids
        before = self._tokenizer.decode(self._token_ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._token_ids[self._prefix :])
        if finished or (len(now) > len(before) and not now.endswith(_REPLACEMENT)):
            self.text += now[len(before) :]
            self._prefix = self._read
            self._read = len(self._token_ids)

    def _cut(self) -> None:
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
