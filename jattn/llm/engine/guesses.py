"""The tokens that a request may have next, for one step to verify: found again in its own text, or a draft model's."""

from __future__ import annotations

from array import array
from itertools import cycle, islice

from jattn.llm.engine.options.speculation import SpeculativeConfig
from jattn.llm.engine.request.request import Request

_BYTES = array("i").itemsize


def guesses_of(config: SpeculativeConfig | None) -> NGramGuesses | DraftGuesses:
    """Returns the source of proposals; it is unused without speculation."""
    if config is None or config.model is not None:
        return DraftGuesses()
    return NGramGuesses(config.prompt_lookup_max, config.prompt_lookup_min)


class NGramGuesses:
    """Finds the last tokens of a request again in its own prompt and output; vLLM's `ngram` method.

    Saxena's prompt lookup (2023): good where the output repeats the input, and free where it does not.

    Args:
        longest: tokens that are looked for at first.
        shortest: tokens that are looked for at last.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._histories: dict[str, array[int]] = {}

    def guess(self, request: Request, count: int) -> tuple[int, ...]:
        """Returns `count` tokens that may come next; none if the last ones are new."""
        # Where the device must know a request's tokens, it would have to know the guesses, too.
        if count < 1 or request.needs_slot:
            return ()
        history = self._histories.setdefault(request.request_id, array("i"))
        history.extend(request.token_ids(len(history), request.num_known_tokens))
        text, last = history.tobytes(), len(history) - 1
        for size in range(min(self._longest, last), self._shortest - 1, -1):
            # Something must follow: the last token itself ends no match.
            found = _last_place(text, text[-size * _BYTES :], last * _BYTES)
            if found >= 0:
                # The match may be near the end: a periodic text then continues its period.
                return tuple(islice(cycle(history[found + size :]), count))
        return ()

    def forget(self, request_id: str) -> None:
        """Drops the state of a request."""
        self._histories.pop(request_id, None)


class DraftGuesses:
    """Asks for guesses of a draft model, which says them on the device; see `NGramGuesses`."""

    def guess(self, request: Request, count: int) -> tuple[int, ...]:
        """Returns as many zeros as guesses are wanted, whose place the draft's tokens take."""
        # Where the device must know a request's tokens, it would have to know the guesses, too.
        return () if request.needs_slot else (0,) * count

    def forget(self, request_id: str) -> None:
        """Has nothing to drop."""


def _last_place(text: bytes, piece: bytes, end: int) -> int:
    """Returns the token at which a piece begins for the last time before byte `end`; -1 if nowhere."""
    place = text.rfind(piece, 0, end)
    while place >= 0 and place % _BYTES:
        place = text.rfind(piece, 0, place + len(piece) - 1)
    return place // _BYTES if place >= 0 else -1
