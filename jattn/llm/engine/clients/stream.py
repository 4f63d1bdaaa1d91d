"""Text as it comes: one caller's requests, decoded and cut at their stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jattn.llm.engine.clients.reader import PromptReader
from jattn.llm.engine.clients.replicas import AnyEngine
from jattn.llm.engine.request.logprobs import Logprob
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.engine.request.request import Request, RequestOutput
from jattn.llm.load import TextTokenizer

__all__ = ["TextDelta", "TextStream"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step brought for one sample of one prompt.

    Attributes:
        index: the prompt's place in the list.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        output: the finished request; None while one of its samples runs.
        sample: of the prompt's n.
        logprobs: of the new tokens, if the request wants them.
        finish_reason: of this sample; None while it runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None
    sample: int = 0
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None


class TextStream(Iterator[TextDelta]):
    """Iterates over the deltas of some requests. Closing or dropping it cancels those that have not finished.

    Any number of streams of one engine may be open, each read by one thread at a time: whoever reads runs the engine
    for all.

    Args:
        engine: runs the requests.
        tokenizer: of the model; None for token ids without text.
        outbox: where the engine puts their news.
        requests: the first sample of each prompt, in the order of the prompts.
    """

    def __init__(
        self, engine: AnyEngine, tokenizer: TextTokenizer | None, outbox: Outbox, requests: Sequence[Request]
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._ready: deque[TextDelta] = deque()
        self._unfinished: dict[str, tuple[int, PromptReader]] = {}
        for index, request in enumerate(requests):
            reader = PromptReader(engine, tokenizer, request)
            self._unfinished.update((sample.request_id, (index, reader)) for sample in request.samples)

    def __next__(self) -> TextDelta:
        while not self._ready:
            if not self._unfinished:
                raise StopIteration
            try:
                deltas = self._engine.wait(self._outbox)
                self._ready.extend(delta for delta in map(self._read, deltas) if delta is not None)
            except BaseException:
                self._abandon()
                raise
        return self._ready.popleft()

    def close(self) -> None:
        """Cancels what has not finished, now."""
        if self._unfinished:
            self._abandon()
            self._engine.settle()

    def __del__(self) -> None:
        # Whatever thread this runs in and whatever that is in the middle of; also where __init__ was interrupted.
        if getattr(self, "_unfinished", None):
            self._abandon()

    def _abandon(self) -> None:
        self._engine.abandon(self._outbox)
        self._unfinished = {}
        self._ready.clear()

    def _read(self, delta: TokenDelta) -> TextDelta | None:
        index, reader = self._unfinished.get(delta.request_id, (0, None))
        new = None if reader is None else reader.read(delta)
        if reader is None or new is None:
            # It ended at a stop string before these tokens.
            return None
        if new.finish_reason is not None:
            del self._unfinished[delta.request_id]
        output = reader.output() if reader.finished else None
        return TextDelta(index, new.text, new.token_ids, output, new.index, new.logprobs, new.finish_reason)
