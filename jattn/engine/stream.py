"""Text as it comes: one caller's requests, decoded and cut at their stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jattn.engine.delivery import Outbox, TokenDelta
from jattn.engine.detokenize import Detokenizer
from jattn.engine.engine import Engine
from jattn.engine.request import CompletionOutput, Request, RequestOutput
from jattn.load import TextTokenizer

__all__ = ["TextDelta", "TextStream"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step brought for one prompt.

    Attributes:
        index: the prompt's place in the list.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        output: the finished request; None while it runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None


@dataclass(frozen=True, slots=True)
class _Reader:
    index: int
    request: Request
    detokenizer: Detokenizer | None


class TextStream(Iterator[TextDelta]):
    """Iterates over the deltas of some requests. Closing or dropping it cancels those that have not finished.

    Any number of streams of one engine may be open, each read by one thread at a time: whoever reads runs the engine
    for all.

    Args:
        engine: runs the requests.
        tokenizer: of the model; None for token ids without text.
        outbox: where the engine puts their news.
        requests: in the order of the prompts.
    """

    def __init__(
        self, engine: Engine, tokenizer: TextTokenizer | None, outbox: Outbox, requests: Sequence[Request]
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._ready: deque[TextDelta] = deque()
        self._unfinished = {
            request.request_id: _Reader(
                index, request, None if tokenizer is None else Detokenizer(tokenizer, request.params.stop)
            )
            for index, request in enumerate(requests)
        }

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
        reader = self._unfinished.get(delta.request_id)
        if reader is None:
            # It ended at a stop string before these tokens.
            return None
        token_ids, text, stopped = delta.token_ids, "", False
        if reader.detokenizer is not None:
            # The token that ended the text is no part of it.
            shown = token_ids[:-1] if delta.finish_reason == "stop" else token_ids
            before = reader.detokenizer.num_tokens
            text = reader.detokenizer.push(shown, finished=delta.finish_reason is not None)
            stopped = reader.detokenizer.stopped
            if stopped:
                token_ids = token_ids[: reader.detokenizer.num_tokens - before]
                self._engine.stop(reader.request, reader.detokenizer.num_tokens)
        output = None
        if delta.finish_reason is not None or stopped:
            del self._unfinished[delta.request_id]
            output = _output(reader)
        return TextDelta(reader.index, text, token_ids, output)


def _output(reader: _Reader) -> RequestOutput:
    request = reader.request
    text = "" if reader.detokenizer is None else reader.detokenizer.text
    completion = CompletionOutput(text, tuple(request.output_token_ids), request.finish_reason)
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        (completion,),
        request.num_cached_tokens,
        request.metrics,
    )
