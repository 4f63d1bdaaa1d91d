"""`AsyncLLM`: requests from any task or thread, and their tokens as the engine's thread delivers them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jattn.llm.engine import (
    LLM,
    CompletionOutput,
    LoRARequest,
    Outbox,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from jattn.llm.engine.clients.stream import PromptReader
from jattn.llm.engine.options.params import cuts_prompt
from jattn.llm.engine.request.outputs import TokenDelta
from jattn.llm.engine.request.request import Request
from jattn.llm.text.prompts import Prompt, encoded, naming
from torch_core.base.checks import check_int
from torch_core.base.errors import EngineClosed, JattnError, PoolLost
from torch_core.base.owners import ClosingOwner

# Steps in a row that may fail before the requests do.
_MOST_FAILURES = 3
# Requests that are added at once, between two steps.
_MOST_ADDERS = 256
_CLOSED = "the AsyncLLM was closed before the request ended."


class Update(NamedTuple):
    """The result of one step for one sample of a request.

    Attributes:
        new: its new text and tokens, and the finish reason if it ended.
        finished: whether all samples ended.
        output: the part that `SamplingParams.output_kind` asks for: the whole request so far, or the new tokens; None
            if it asks only for the final output.
    """

    new: CompletionOutput
    finished: bool
    output: RequestOutput | None


#: Called on the engine's thread with each update in order, or with the error that ended the request. It must not block.
Deliver: TypeAlias = Callable[[Update | BaseException], None]


class AsyncLLM(ClosingOwner):
    """An `LLM` for asyncio and for threads. Any method may be called from any task or thread.

    In a process that serves for long, see `LLM` on garbage collections.

    Args:
        llm: the `LLM` to run; it is closed together with this object.

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
        # Not by their ids: a later request may have the id of one that is about to end.
        self._entries: dict[Request, _Entry] = {}
        self._reservations: set[Reservation] = set()
        # A sample goes from its reservation to its entry in one step. Finalizers, which must not wait, only remove.
        self._counting = threading.Lock()
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
        # Each waits for a step to end, and must not take the threads of other work from an event loop.
        self._adders = ThreadPoolExecutor(_MOST_ADDERS, "jattn-add")
        self._num_failures = 0
        self._closed = False

    @property
    def num_unfinished(self) -> int:
        """Number of samples that are reserved, wait or run; each counts once."""
        with self._counting:
            num_reserved = sum(each.num_samples for each in list(self._reservations))
            return num_reserved + sum(len(entry.request.samples) for entry in list(self._entries.values()))

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return not self._closed and not (self.llm.generates and self.llm.engine.closed)

    @property
    def is_asleep(self) -> bool:
        """Whether its requests wait for `Engine.wake`."""
        return self.llm.generates and self.llm.engine.asleep

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests, and none waits for programs that others need; see `Engine.is_ready`."""
        return self.is_running and (not self.llm.generates or self.llm.engine.is_ready)

    @contextlib.contextmanager
    def reserve(self, num_samples: int) -> Iterator[Reservation]:
        """Counts samples in `num_unfinished` before they are queued; those that `submit` has not queued until the end.

        Args:
            num_samples: number of samples of the prompts for which `submit` gets the reservation.
        """
        check_int("num_samples", num_samples, 0)
        reservation = Reservation(num_samples)
        self._reservations.add(reservation)
        try:
            yield reservation
        finally:
            self._reservations.discard(reservation)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        deliver: Deliver,
        request_id: str | None = None,
        salt: bytes | None = None,
        priority: int = 0,
        inputs: Mapping[str, int | float] | None = None,
        lora: str | LoRARequest | None = None,
    ) -> str:
        """Queues a request and returns its id; it may wait for a step to end.

        Args:
            prompt, params: as in `LLM.generate`.
            deliver: function called with each update; see `Deliver`.
            request_id, salt, priority, inputs, lora: as in `Engine.add`.

        Raises:
            InvalidInput: an argument is bad; nothing was queued, and nothing is delivered.
            EngineClosed: this object is closed.
            RequestTooLong: the request can never fit.
        """
        options: dict[str, Any] = {"salt": salt, "priority": priority, "inputs": inputs, "lora": lora}
        return self._added(prompt, params, deliver, request_id=request_id, **options).request.request_id

    def _added(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        deliver: Deliver,
        then: Callable[[], object] | None = None,
        reservation: Reservation | None = None,
        **options: Any,
    ) -> _Entry:
        """Adds a request; `then` is called after `deliver`, once for all requests of a step that share it."""
        params = self.llm.get_default_sampling_params() if params is None else params
        token_ids, text = encoded(prompt, self.llm.tokenizer, self.llm.longest_prompt, cut=cuts_prompt(params))
        engine, outbox = self.llm.engine, Outbox()
        self._check_open()
        engine.check_model()
        request = engine.add(token_ids, params, prompt=text, outbox=outbox, **options)
        entry = _Entry(self, request, PromptReader(engine, self.llm.tokenizer, request), deliver, then)
        with self._counting:
            self._entries[request] = entry
            if reservation is not None:
                reservation.num_samples -= len(request.samples)
        if self._closed:
            self.end(entry, EngineClosed(_CLOSED))
        else:
            engine.subscribe(outbox, entry.receive, then)
        return entry

    def cancel(self, request_id: str) -> None:
        """Ends a request with all its samples soon, without waiting; a finished request does not change."""
        for entry in list(self._entries.values()):
            if entry.request.request_id == request_id:
                self.end(entry)

    def end(self, entry: _Entry, error: BaseException | None = None) -> None:
        """Forgets a request, cancels its running samples, and passes an error to its caller."""
        if self._entries.pop(entry.request, None) is not None:
            if self.llm.engine.runs_for(entry.request.outbox):
                self.llm.engine.abandon(entry.request.outbox)
            # Of a request that nobody follows yet.
            entry.request.outbox.take()
            if error is not None:
                with contextlib.suppress(Exception):
                    is_ours = isinstance(error, JattnError)
                    entry.deliver(error if is_ours else RuntimeError(f"the request failed: {error}"))
                    if entry.then is not None:
                        entry.then()

    def note_step(self, error: BaseException | None) -> None:
        """Counts the steps in a row that failed; ends every request with the error of the last that may fail."""
        self._num_failures = 0 if error is None else self._num_failures + 1
        if error is None or (isinstance(error, PoolLost) and self._num_failures < _MOST_FAILURES):
            return
        self._num_failures = 0
        self._end_all(error)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **options: Any
    ) -> Submission:
        """Queues prompts with the same parameters, and `add`'s other options. If one is refused, none is queued.

        With `reservation`, a result of `reserve`, their samples are counted in its place.

        They are cancelled when the last reference to the result is gone, as that of a task whose loop was closed.

        Raises:
            InvalidInput, RequestTooLong: as `add`.
        """
        submission = Submission(self, self._mailbox())
        reference, entries = weakref.ref(submission), submission.entries
        weakref.finalize(submission, _end_each, self, entries).atexit = False

        def add_all() -> None:
            for index, prompt in enumerate(prompts):
                deliver = functools.partial(_deliver_to, reference, index)
                with naming(index, prompts):
                    entry = self._added(prompt, params, deliver, submission.mailbox.send, **options)
                entries.append(entry)
                request = entry.request
                submission.num_prompt_tokens.append(len(request.encoder_token_ids or request.prompt_token_ids))

        self._check_open()
        try:
            adding = self._adders.submit(contextvars.copy_context().run, add_all)
        except RuntimeError:
            # Another thread has closed it in between.
            self._check_open()
            raise
        try:
            await asyncio.wrap_future(adding)
        except BaseException:
            # A thread cannot be cancelled: its request is cancelled after it was added, when the loop may be gone.
            adding.add_done_callback(lambda _: submission.cancel())
            raise
        return submission

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
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
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's outputs of the kind `SamplingParams.output_kind`; otherwise like `stream`."""
        async with contextlib.aclosing(self.stream(prompt, params, **options)) as updates:
            async for update in updates:
                if update.output is not None:
                    yield update.output

    async def add_lora(self, lora_request: LoRARequest | str, adapter: Any = None, **options: Any) -> None:
        """Loads an adapter on another thread; see `Engine.add_lora`."""
        await asyncio.to_thread(self.llm.add_lora, lora_request, adapter, **options)

    async def remove_lora(self, name: str | int) -> None:
        """Forgets an adapter; see `Engine.remove_lora`."""
        await asyncio.to_thread(self.llm.remove_lora, name)

    async def pin_lora(self, name: str | int) -> None:
        """Keeps an adapter on the device; see `Engine.pin_lora`."""
        await asyncio.to_thread(self.llm.pin_lora, name)

    async def list_loras(self) -> dict[str, LoRARequest]:
        """Returns how each adapter was loaded, by name."""
        return self.llm.list_loras()

    def _mailbox(self) -> _Mailbox:
        """Returns the mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        return self._mailboxes.setdefault(loop, _Mailbox(loop))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the AsyncLLM is closed; build another one.")

    def close(self) -> None:
        """Ends every request with an error and closes the engine."""
        if not self._closed:
            self._closed = True
            try:
                self._end_all(EngineClosed(_CLOSED))
            finally:
                self.llm.close()
                self._adders.shutdown(wait=False)

    def _end_all(self, error: BaseException) -> None:
        # All are told, also where one of them raises more than an Exception.
        with contextlib.ExitStack() as ends:
            for entry in list(self._entries.values()):
                ends.callback(self.end, entry, error)


@dataclass(eq=False, slots=True)
class Reservation:
    """Samples that are counted although they are not queued; see `AsyncLLM.reserve`."""

    num_samples: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A request whose end the caller has not seen."""

    llm: AsyncLLM
    request: Request
    reader: PromptReader
    deliver: Deliver
    then: Callable[[], object] | None

    def receive(self, news: list[TokenDelta] | BaseException) -> None:
        """Converts deltas to updates, on the engine's thread."""
        if isinstance(news, BaseException):
            self.llm.note_step(news)
            return
        self.llm.note_step(None)
        reader, kind = self.reader, self.request.params.output_kind
        try:
            for delta in news:
                new, output = reader.read(delta), None
                if new is None:
                    continue
                if kind is RequestOutputKind.DELTA:
                    output = reader.output((new,))
                elif reader.finished or kind is RequestOutputKind.CUMULATIVE:
                    output = reader.output()
                # Of an ended request no error would be delivered.
                if reader.finished:
                    self.llm.end(self)
                self.deliver(Update(new, reader.finished, output))
        except BaseException as error:
            # A tokenizer that fails, a loop that is gone or a cancelled task: this request ends, the others go on.
            self.llm.end(self, error)


class _Mailbox:
    """Hands what other threads put to the functions of an event loop, which is woken once for all of a step.

    To wake a loop takes longer than to decode a token: 256 users would wait for it 256 times in each step.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # The loop is the key of its mailbox, which must not keep it alive.
        self._loop = weakref.ref(loop)
        self._waiting: deque[tuple[Callable[[Any], object], Any]] = deque()

    def put(self, receive: Callable[[Any], object], news: Any) -> None:
        """Keeps the argument of a function until `send`, on any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop of the request is closed.")
        self._waiting.append((receive, news))

    def send(self) -> None:
        """Has the loop call the functions, on any thread."""
        loop = self._loop()
        # A loop that closes meanwhile is found by the next `put`.
        with contextlib.suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        while self._waiting:
            receive, news = self._waiting.popleft()
            receive(news)


def _end_each(llm: AsyncLLM, entries: Sequence[_Entry]) -> None:
    for entry in entries:
        llm.end(entry)


def _deliver_to(reader: weakref.ref[Submission], index: int, update: Update | BaseException) -> None:
    """Delivers to a submission that the request does not keep alive; without it the request was cancelled."""
    submission = reader()
    if submission is not None:
        submission.deliver(index, update)


class Submission(contextlib.AbstractContextManager):
    """The updates of some prompts, for one task; as a context manager it cancels the unfinished ones at the end.

    Attributes:
        num_prompt_tokens: number of tokens of each one's prompt.
        entries: the added requests.
        mailbox: mailbox of the task's event loop.
    """

    def __init__(self, llm: AsyncLLM, mailbox: _Mailbox) -> None:
        self.entries: list[_Entry] = []
        self.num_prompt_tokens: list[int] = []
        self._llm = llm
        self.mailbox = mailbox
        self._updates: asyncio.Queue[tuple[int, Update | BaseException]] = asyncio.Queue()
        self._num_finished = 0

    def deliver(self, index: int, update: Update | BaseException) -> None:
        """Receives an update of a prompt, on any thread; it comes with the mailbox's next `send`."""
        self.mailbox.put(self._updates.put_nowait, (index, update))

    def cancel(self) -> None:
        """Cancels the unfinished requests."""
        _end_each(self._llm, self.entries)

    def __exit__(self, *error: object) -> None:
        if self._num_finished < len(self.entries):
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """Yields each update with the index of its prompt; raises the error that ended a request."""
        while self._num_finished < len(self.entries):
            index, update = await self._updates.get()
            if isinstance(update, BaseException):
                raise update
            self._num_finished += update.finished
            yield index, update

    async def joined(self) -> AsyncIterator[tuple[int, CompletionOutput, RequestOutput | None]]:
        """Yields the new part of a sample with the index of its prompt, and the request's output at its end.

        Parts that wait together come as one, so that a reader that is slower than the steps does not fall behind. For
        requests with `RequestOutputKind.FINAL_ONLY`.
        """
        async for index, update in self:
            found, error = {(index, update.new.index): (update.new, update.output)}, None
            while not self._updates.empty():
                index, update = self._updates.get_nowait()
                if isinstance(update, BaseException):
                    error = update
                    break
                self._num_finished += update.finished
                key = index, update.new.index
                new = found[key][0] + update.new if key in found else update.new
                found[key] = new, update.output
            for (index, _), (new, output) in found.items():
                yield index, new, output
            if error is not None:
                raise error
