"""What came for whom: each caller has an outbox of its own, filled by whoever runs the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jattn.engine.request import Request

__all__ = ["Outbox", "TokenDelta"]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What came for one request since the last delta.

    Attributes:
        request_id: whose.
        token_ids: its new tokens, in order.
        finish_reason: "length", "stop" or "cancelled"; None while it runs.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Outbox:
    """The news of one caller's requests, in the order in which they came.

    It notes that a request has news and from which token on; what they are is read off the request when they are
    taken. So an interrupted step can neither lose a token nor say it twice. Used under the engine's lock.
    """

    def __init__(self) -> None:
        self._news: dict[Request, int] = {}

    def note(self, request: Request) -> None:
        """Says that a request is about to get tokens or to end; call it before that happens."""
        self._news.setdefault(request, len(request.output_token_ids))

    def take(self) -> list[TokenDelta]:
        """Returns what came since the last call, one delta for each request; all of it or, if interrupted, nothing."""
        news = self._news
        # Before the try: Python 3.13 puts parts of a comprehension outside the one that it stands in.
        deltas = [delta for request, start in news.items() if (delta := _delta(request, start)) is not None]
        try:
            self._news = {}
            return deltas
        except BaseException:
            self._news = news
            raise

    def take_one(self, request: Request) -> TokenDelta | None:
        """Returns what came for one request since the last call, or None if nothing did."""
        start = self._news.pop(request, None)
        return None if start is None else _delta(request, start)


def _delta(request: Request, start: int) -> TokenDelta | None:
    token_ids = tuple(request.output_token_ids[start:])
    if not token_ids and request.finish_reason is None:
        return None
    return TokenDelta(request.request_id, token_ids, request.finish_reason)
