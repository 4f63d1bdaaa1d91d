"""What came for whom: each caller has an outbox of its own, filled by whoever runs the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from jattn.llm.engine.request.request import Request

__all__ = ["News", "Outbox", "TokenDelta"]

#: Requests that have news, each with its first new token.
News: TypeAlias = "dict[Request, int]"


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What came for one request since the last delta.

    Attributes:
        request_id: whose.
        token_ids: its new tokens, in order.
        finish_reason: of `CompletionOutput`; None while it runs.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Outbox:
    """The news of one caller's requests, in the order in which they came. Used under the engine's lock.

    It notes that a request has news and from which token on; what they are is read off the request when they are
    taken. So an interrupted step can neither lose a token nor say it twice.
    """

    def __init__(self) -> None:
        self._news: News = {}

    def note(self, request: Request) -> None:
        """Says that a request is about to get tokens or to end; call it before that happens."""
        self._news.setdefault(request, len(request.output_token_ids))

    def news(self, request: Request | None = None) -> News:
        """Returns the requests that have news, or the one asked for if it has, each with its first new token."""
        noted = self._news
        if request is not None:
            noted = {request: noted[request]} if request in noted else {}
        return {key: at for key, at in noted.items() if len(key.output_token_ids) > at or key.finish_reason is not None}

    def take(self, news: News) -> list[TokenDelta]:
        """Returns what came, one delta for each request, and takes it out; all of it or, if interrupted, nothing."""
        noted = self._news
        deltas = [
            TokenDelta(key.request_id, (*key.output_token_ids[at:],), key.finish_reason) for key, at in news.items()
        ]
        try:
            self._news = {key: at for key, at in noted.items() if key not in news} if news != noted else {}
            return deltas
        except BaseException:
            self._news = noted
            raise

    def put_back(self, news: News) -> None:
        """Undoes `take`, whatever came since."""
        self._news = news | self._news | news
