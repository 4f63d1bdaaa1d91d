"""Outputs as text: `PromptReader` decodes the samples of one prompt, `TextStream` iterates over several prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jattn.llm.engine.clients.replicas import AnyEngine
from jattn.llm.engine.request.outputs import CompletionOutput, Logprob, Outbox, RequestOutput, TokenDelta
from jattn.llm.engine.request.request import Request
from jattn.llm.load import TextTokenizer
from jattn.llm.text.detokenize import Detokenizer
from jattn.llm.text.tokens import TokenBytes
from torch_core.base.owners import Owner


# Not frozen, as `CompletionOutput`.
@dataclass(slots=True)
class TextDelta:
    """The new text of one sample of one prompt.

    Attributes:
        index: index of the prompt in the list.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        output: the finished request; None while one of its samples runs.
        sample: index among the prompt's n samples.
        logprobs: log-probabilities of the new tokens, if the request asks for them.
        finish_reason: finish reason of this sample; None while it runs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None
    sample: int = 0
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None


class TextStream(Owner, Iterator[TextDelta]):
    """Iterates over the deltas of some requests. Closing or dropping it cancels those that have not finished.

    Any number of streams of one engine may be open, each read by one thread at a time. Steps run while one is read.

    Args:
        engine: the engine that runs the requests.
        tokenizer: tokenizer of the model; None for token ids without text.
        outbox: outbox of the requests.
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
        """Cancels the unfinished requests now."""
        if self._unfinished:
            self._abandon()
            self._engine.settle()

    def __del__(self) -> None:
        # In any thread, in the middle of anything; also where __init__ was interrupted.
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


class PromptReader:
    """Turns the engine's deltas for the samples of one prompt into text, and ends those that reach a stop string.

    Args:
        engine: the engine that runs the requests.
        tokenizer: tokenizer of the model; None for token ids without text.
        request: the first sample.

    Attributes:
        finished: all samples ended.
    """

    def __init__(self, engine: AnyEngine, tokenizer: TextTokenizer | None, request: Request) -> None:
        self._engine = engine
        self._text_of = None if tokenizer is None else TokenBytes(tokenizer).text
        self._request = request
        self._samples = {sample.request_id: _Sample(sample, tokenizer) for sample in request.samples}
        self.finished = False

    def read(self, delta: TokenDelta) -> CompletionOutput | None:
        """Returns the new text of a sample, with the reason if it ended; None if it had ended before."""
        sample = self._samples[delta.request_id]
        if sample.finish_reason is not None:
            return None
        _, token_ids, reason = delta
        text, stop_string, detokenizer, request = "", None, sample.detokenizer, sample.request
        if detokenizer is not None:
            of_text, before, params = token_ids, detokenizer.num_tokens, request.params
            if reason == "error" or (reason == "stop" and not params.include_stop_str_in_output):
                # The token that ended the text is no part of it.
                of_text = token_ids[:-1] if params.include_eos_token else token_ids
            text = detokenizer.push(of_text, finished=reason is not None)
            stop_string = detokenizer.stop_string
            if stop_string is not None:
                token_ids, reason = token_ids[: detokenizer.num_tokens - before], "stop"
                self._engine.stop(request, detokenizer.num_tokens)
        if reason is not None:
            sample.finish_reason = reason
            self.finished = all(each.finish_reason is not None for each in self._samples.values())
        start = len(sample.token_ids)
        sample.token_ids += token_ids
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = request.known_logprobs(start, token_ids, self._text_of)
            sample.logprobs += logprobs or ()
        return request.completion(token_ids, reason, start=start, logprobs=logprobs, text=text, stop_string=stop_string)

    def output(self, completions: tuple[CompletionOutput, ...] | None = None) -> RequestOutput:
        """Returns all text so far, or the given part of it."""
        if completions is None:
            completions = tuple(sample.so_far() for sample in self._samples.values())
        # A stop string may have ended a sample that the engine's thread has not ended yet.
        return self._request.output(completions, self._text_of, finished=self.finished)


class _Sample:
    """One sample's text, and the number of its tokens that were read."""

    def __init__(self, request: Request, tokenizer: TextTokenizer | None) -> None:
        params = request.params
        self.request = request
        self.detokenizer = None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(
                tokenizer,
                params.stop,
                prompt=request.prompt_token_ids,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None

    def so_far(self) -> CompletionOutput:
        """Returns all tokens that were read, with their text."""
        detokenizer = self.detokenizer
        return self.request.completion(
            tuple(self.token_ids),
            self.finish_reason,
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
            text="" if detokenizer is None else detokenizer.text,
            stop_string=None if detokenizer is None else detokenizer.stop_string,
        )
