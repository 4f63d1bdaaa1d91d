"""AsyncLLM: requests from any task or thread, tokens as they come; one thread runs the engine for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jattn.llm.engine import LLM, CompletionOutput, Outbox, RequestOutput, RequestOutputKind, SamplingParams
from jattn.llm.engine.clients.reader import PromptReader
from jattn.llm.engine.request.outputs import TokenDelta
from jattn.llm.text.prompts import Prompt, encoded, naming
from torch_core.base.errors import EngineAsleep, InvalidInput, JattnError, PoolLost

__all__ = ["AsyncLLM", "Submission", "Update"]

# Steps in a row that may fail before the requests do.
_MOST_FAILURES = 3
# Between two looks at an engine that sleeps.
_NAP_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one step for one sample of a request.

    Attributes:
        new: its new text and tokens; the reason, if it ended.
        finished: all samples ended.
        output: the part that `SamplingParams.output_kind` asks for: the whole request so far, or the new tokens; None
            if it asks only for the final output.
    """

    new: CompletionOutput
    finished: bool
    output: RequestOutput | None


#: Called on the engine's thread with each update in order, or with the error that ended the request. It must not block.
Deliver: TypeAlias = Callable[[Update | Exception], None]


@dataclass(frozen=True, slots=True)
class _Entry:
    reader: PromptReader
    deliver: Deliver
    kind: RequestOutputKind


class AsyncLLM(contextlib.AbstractContextManager):
    """An `LLM` for asyncio and for threads. Any method may be called from any task or thread.

    Args:
        llm: closed with this one.

    Example:
        >>> async def answer() -> str:
        ...     with AsyncLLM(LLM()) as llm:
        ...         async for output in llm.generate("The list", SamplingParams(temperature=0.0, max_tokens=4)):
        ...             text = output.outputs[0].text
        ...     return text
        >>> isinstance(asyncio.run(answer()), str)
        True
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._outbox = Outbox()
        # By the id of each sample; changed under the lock, which the engine's thread never holds in a step.
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._to_cancel: deque[str] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jattn-engine", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Samples that wait or run."""
        return len(self._entries)

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread is alive and takes requests."""
        return self._thread.is_alive() and not self._closed

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        deliver: Deliver,
        request_id: str | None = None,
        salt: bytes | None = None,
        priority: int = 0,
    ) -> str:
        """Queues a request and returns its id; it may wait for a step to end.

        Args:
            prompt, params: as in `LLM.generate`.
            deliver: called with each update; see `Deliver`.
            request_id, salt, priority: as in `Engine.add`.

        Raises:
            InvalidInput: a bad argument, or closed; nothing was queued, and nothing is delivered.
            RequestTooLong: it can never fit.
        """
        token_ids, text = encoded(prompt, self.llm.tokenizer)
        # No request's tokens wait for a grammar.
        self.llm.engine.prepare(params)
        with self._lock:
            if self._closed:
                raise InvalidInput("the AsyncLLM is closed; build another one.")
            request = self.llm.engine.add(
                token_ids,
                self.llm.get_default_sampling_params() if params is None else params,
                prompt=text,
                request_id=request_id,
                salt=salt,
                priority=priority,
                outbox=self._outbox,
            )
            reader = PromptReader(self.llm.engine, self.llm.tokenizer, request)
            entry = _Entry(reader, deliver, request.params.output_kind)
            self._entries.update((sample.request_id, entry) for sample in request.samples)
        self._wake.set()
        return request.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request with all its samples soon, without waiting; one that has ended is left alone."""
        self._to_cancel.append(request_id)
        self._wake.set()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Submission:
        """Queues prompts with the same parameters, and `add`'s other options; all or, if one is refused, none.

        Raises:
            InvalidInput, RequestTooLong: as `add`.
        """
        submission = Submission(self)

        def add_all() -> None:
            for index, prompt in enumerate(prompts):
                deliver = functools.partial(submission.deliver, index)
                with naming(index, prompts):
                    submission.ids.append(self.add(prompt, params, deliver=deliver, **options))

        adding = asyncio.ensure_future(asyncio.to_thread(add_all))
        try:
            await asyncio.shield(adding)
        except BaseException:
            # A thread cannot be cancelled: its request is cancelled after it was added.
            adding.add_done_callback(lambda done: (done.cancelled() or done.exception(), submission.cancel()))
            raise
        return submission

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[Update, None]:
        """Yields the outputs of each step. Closing the generator, or cancelling its task, cancels the request.

        Raises:
            InvalidInput, RequestTooLong: as `add`, before the first update.
            PoolLost: the device failed several times in a row.
        """
        submission = await self.submit([prompt], params, **options)
        with submission:
            async for _, update in submission:
                yield update

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's output as `SamplingParams.output_kind` says; else as `stream`."""
        async with contextlib.aclosing(self.stream(prompt, params, **options)) as updates:
            async for update in updates:
                if update.output is not None:
                    yield update.output

    def close(self) -> None:
        """Ends every request with an error and closes the engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            entries = self._requests()
            self._entries.clear()
        for entry in entries:
            _tell(entry, InvalidInput("the AsyncLLM was closed before the request ended."))
        self.llm.close()
        self._wake.set()
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        failures = 0
        while True:
            self._wake.wait()
            self._wake.clear()
            while not self._closed:
                self._cancel_requested()
                try:
                    deltas = self.llm.engine.wait(self._outbox)
                except EngineAsleep:
                    # Its requests survive. The end of the sleep is not announced: `wake` is a call of the engine.
                    self._wake.clear()
                    self._wake.wait(_NAP_SECONDS)
                    continue
                except Exception as error:
                    if self._closed:
                        break
                    failures += 1
                    if isinstance(error, PoolLost) and failures < _MOST_FAILURES:
                        continue
                    self._fail_all(error)
                    failures = 0
                    break
                failures = 0
                if not deltas:
                    break
                for delta in deltas:
                    self._hand_out(delta)
            if self._closed:
                return

    def _hand_out(self, delta: TokenDelta) -> None:
        with self._lock:
            entry = self._entries.get(delta.request_id)
        if entry is None:
            return
        try:
            new = entry.reader.read(delta)
            if new is None:
                return
            reader, output = entry.reader, None
            if reader.finished:
                self._drop(entry)
            if entry.kind is RequestOutputKind.DELTA:
                output = reader.output((new,))
            elif reader.finished or entry.kind is RequestOutputKind.CUMULATIVE:
                output = reader.output()
            entry.deliver(Update(new, reader.finished, output))
        except Exception as error:
            # A tokenizer that fails or a loop that is gone: this request ends, the others go on.
            self._end(entry, error)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            entries = self._requests()
        for entry in entries:
            self._end(entry, error)

    def _cancel_requested(self) -> None:
        while self._to_cancel:
            with self._lock:
                entry = self._entries.get(self._to_cancel.popleft())
            if entry is not None:
                self._end(entry, None)

    def _end(self, entry: _Entry, error: Exception | None) -> None:
        for sample in self._drop(entry):
            # One of several samples may have ended.
            with contextlib.suppress(InvalidInput):
                self.llm.engine.cancel(sample)
        if error is not None:
            _tell(entry, error)

    def _requests(self) -> list[_Entry]:
        """Returns each request once, however many samples it has; under the lock."""
        return list({id(each): each for each in self._entries.values()}.values())

    def _drop(self, entry: _Entry) -> list[str]:
        """Forgets a request and returns the ids of its samples."""
        with self._lock:
            samples = [each for each, other in self._entries.items() if other is entry]
            for sample in samples:
                del self._entries[sample]
        return samples


class Submission(contextlib.AbstractContextManager):
    """The updates of some prompts, for one task; as a context manager it cancels the unfinished ones at the end.

    Attributes:
        ids: of the requests that were added.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.ids: list[str] = []
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._num_finished = 0

    def deliver(self, index: int, update: Update | Exception) -> None:
        """Takes an update of a prompt; on any thread."""
        self._loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

    def cancel(self) -> None:
        """Cancels the unfinished requests."""
        for request_id in self.ids:
            self._llm.cancel(request_id)

    def __exit__(self, *error: object) -> None:
        if self._num_finished < len(self.ids):
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """Yields each update with the place of its prompt; raises the error that ended a request."""
        while self._num_finished < len(self.ids):
            index, update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            self._num_finished += update.finished
            yield index, update


def _tell(entry: _Entry, error: Exception) -> None:
    with contextlib.suppress(Exception):
        entry.deliver(error if isinstance(error, JattnError) else RuntimeError(f"the request failed: {error}"))
