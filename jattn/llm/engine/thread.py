"""The thread that owns an engine's core: commands come in by a queue, replies and outputs go out to their callers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import jax

from jattn.llm.engine.core import EngineCore
from jattn.llm.engine.request.outputs import Outbox, TokenDelta
from jattn.llm.reports import LOGGER
from torch_core.base.errors import EngineClosed
from torch_core.base.owners import Owner

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Reply: TypeAlias = Callable[[Any], object]

#: Called on the engine's thread with the deltas of an outbox, or with the error of a step. It must not block.
Listener: TypeAlias = Callable[[list[TokenDelta] | BaseException], None]

# The longest time that a dropped engine, or the end of the program, waits for the step that runs.
_END_SECONDS = 10.0
# How often a caller that waits for a reply looks whether the thread is alive.
_LOOK_SECONDS = 5.0
_all_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread(Owner):
    """One thread and the `EngineCore` that it owns. Any thread may call any method.

    Steps run while a caller waits for an outbox. An interrupt reaches the caller's thread alone: its command is still
    carried out, and outputs stay in their outbox. Settings of JAX that belong to the caller's thread, such as a mesh
    or a transfer guard, do not reach the engine, except for the default device.

    When this object is dropped, and when the program ends, the thread closes the core and ends.

    Callers wait for the thread, and the thread waits for no caller. A caller may hold locks meanwhile, in this order:
    that of its `Follower`, of the router of several copies, of the adapters. The thread takes none of these, and what
    it calls (listeners, replies) must not block. Every command has an answer, also after the end of the thread.

    Args:
        build: returns the core; runs on the thread.

    Attributes:
        core: other threads only read from it.
    """

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        self._commands: SimpleQueue[Any] = SimpleQueue()
        built: SimpleQueue[Any] = SimpleQueue()
        arguments = (self._commands, build, built.put, cast(Any, jax.config).jax_default_device)
        self._thread = threading.Thread(target=_run, args=arguments, name="jattn-engine", daemon=True)
        self._end = weakref.finalize(self, _end, self._commands, self._thread)
        self._end.atexit = False
        _end_all_at_exit()
        _all_threads.add(self)
        self._thread.start()
        try:
            self._loop: _Loop = self._result_of(built)
        except Exception:
            # It was told before it ends.
            self._thread.join(_END_SECONDS)
            raise
        self.core = self._loop.core

    def call(
        self, method: Callable[Concatenate[EngineCore, _Args], _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Runs a method of the core on the thread, between two steps; returns its result or raises its error."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            # A core without its thread is closed, and refuses methods that need a device.
            return method(self.core, *args, **kwargs)
        reply: SimpleQueue[Any] = SimpleQueue()
        self._send(_Loop.call, lambda core: method(core, *args, **kwargs), reply.put)
        return self._result_of(reply)

    def post(
        self, method: Callable[Concatenate[EngineCore, _Args], object], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> None:
        """Like `call`, but returns at once. Safe in a finalizer."""
        # A finalizer must not wait; nothing is left to do if the thread has ended.
        self._commands.put((_Loop.call, lambda core: method(core, *args, **kwargs), _ignore))

    def later(self, method: Callable[[EngineCore], object]) -> Callable[[], None]:
        """Returns a function that posts a method of the core, and that does not keep this object alive."""
        reference = weakref.ref(self)

        def post() -> None:
            if (thread := reference()) is not None:
                thread.post(method)

        return post

    def wait(self, outbox: Outbox) -> None:
        """Runs steps until an outbox has deltas, or no unfinished request.

        Raises:
            PoolLost: as `EngineCore.step`.
            EngineAsleep, EngineClosed: the engine is asleep, or closed.
        """
        reply: SimpleQueue[Any] = SimpleQueue()
        self.notify(outbox, reply.put)
        self._result_of(reply)

    def notify(self, outbox: Outbox, reply: _Reply) -> None:
        """Like `wait`, but returns at once; `reply` is called on the thread with an `Outcome`."""
        self._send(_Loop.read, outbox, reply, True)

    def subscribe(self, outbox: Outbox, listener: Listener, then: Callable[[], object] | None = None) -> None:
        """Runs steps as long as an outbox has an unfinished request, and passes every delta to a listener.

        Args:
            outbox: outbox of added requests.
            listener: see `Listener`.
            then: called on the thread when all listeners of a step were told, once for listeners that share it.
        """
        self._send(_Loop.read, outbox, listener, False, then)

    def end(self) -> None:
        """Closes the core and ends the thread."""
        self._end()

    def _send(self, *command: Any) -> None:
        self._commands.put(command)
        # In this order: either this thread sees the end, or the loop's last look at the queue finds the command.
        if self._loop.has_ended:
            self._loop.answer_rest()

    def _result_of(self, reply: SimpleQueue[Any]) -> Any:
        found = None
        while found is None:
            try:
                found = reply.get(timeout=_LOOK_SECONDS)
            except Empty:
                if not self._thread.is_alive() and reply.empty():
                    raise EngineClosed("the engine is closed; build another one.") from None
        try:
            return found.result()
        finally:
            # An error's frames would keep it, and the core with it.
            del found


class Outcome(NamedTuple):
    """The reply to a command."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Returns the value, or raises the error."""
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            del self


class _Reader(NamedTuple):
    """A caller that reads an outbox: once, by a reply, or until its requests have ended, by a listener."""

    tell: Callable[[Any], object]
    is_once: bool
    then: Callable[[], object] | None = None


class _Loop:
    """The thread's side: carries commands out, and runs steps while an outbox is read.

    Args:
        core: owned by the thread.
        commands: each a method of this class and its arguments; None ends the loop.

    Attributes:
        core: as given.
        has_ended: it carries out no more commands by itself; set before it looks for the last ones.
    """

    def __init__(self, core: EngineCore, commands: SimpleQueue[Any]) -> None:
        self.core, self._commands = core, commands
        self.has_ended = False
        # Reentrant: a listener may have a command, too.
        self._ending = threading.RLock()
        # In the order in which they began to wait.
        self._readers: dict[Outbox, _Reader] = {}

    def run(self) -> None:
        """Runs until it is told to end; then the core is closed."""
        try:
            self._carry_out()
        finally:
            with self._ending:
                self.has_ended = True
                try:
                    self.core.close()
                finally:
                    self.answer_rest()

    def answer_rest(self) -> None:
        """Carries out the commands that came too late, on any thread: the core is closed, and refuses most."""
        with self._ending:
            while not self._commands.empty():
                command = self._commands.get()
                if command is not None:
                    method, *arguments = command
                    method(self, *arguments)
            self._hand_out()

    def _carry_out(self) -> None:
        while True:
            if self._readers and not self.core.asleep and self._commands.empty():
                self._step()
            else:
                if self._commands.empty():
                    with contextlib.suppress(BaseException):
                        self.core.settle()
                command = self._commands.get()
                if command is None:
                    return
                method, *arguments = command
                method(self, *arguments)
                # Objects that a caller dropped must not live until the next command.
                del command, arguments
            self._hand_out()

    def call(self, method: Callable[[EngineCore], Any], reply: _Reply) -> None:
        """Runs a method of the core."""
        try:
            reply(Outcome(method(self.core)))
        except BaseException as error:
            reply(Outcome(error=error))

    def read(
        self,
        outbox: Outbox,
        tell: Callable[[Any], object],
        is_once: bool,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Adds a reader of an outbox."""
        try:
            if is_once and not outbox:
                self.core.check_awake()
        except Exception as error:
            _call(tell, Outcome(error=error))
            return
        self._readers[outbox] = _Reader(tell, is_once, then)
        if outbox or not self.core.runs_for(outbox):
            self.core.ready.add(outbox)

    def _step(self) -> None:
        try:
            self.core.step()
        except BaseException as error:
            # The caller that has waited longest learns of it, and the next step is the next caller's.
            self._fail(next(iter(self._readers)), error)

    def _hand_out(self) -> None:
        """Tells the readers of the outboxes that got deltas."""
        core, told = self.core, dict[Callable[[], object], None]()
        while core.ready:
            outbox = core.ready.pop()
            reader = self._readers.get(outbox)
            if reader is None:
                continue
            tell, is_once, then = reader
            if is_once or not core.runs_for(outbox):
                del self._readers[outbox]
            if is_once:
                _call(tell, Outcome())
            elif deltas := outbox.take():
                _call(tell, deltas)
                if then is not None:
                    told[then] = None
        for then in told:
            _call(then)
        if self.core.asleep:
            for outbox in [outbox for outbox, reader in self._readers.items() if reader.is_once]:
                try:
                    self.core.check_awake()
                except Exception as error:
                    self._fail(outbox, error)

    def _fail(self, outbox: Outbox, error: BaseException) -> None:
        reader = self._readers[outbox]
        if reader.is_once:
            del self._readers[outbox]
        _call(reader.tell, Outcome(error=error) if reader.is_once else error)


def _call(function: Callable[..., object], *news: Outcome | list[TokenDelta] | BaseException) -> None:
    """Calls a caller's function; nothing that it raises, not even asyncio's CancelledError, ends the thread."""
    try:
        function(*news)
    except BaseException:
        LOGGER.exception("a listener failed")


def _ignore(outcome: Outcome) -> None:
    if outcome.error is not None:
        LOGGER.debug("a command failed: %s", outcome.error)


def _run(commands: SimpleQueue[Any], build: Callable[[], EngineCore], reply: _Reply, device: Any) -> None:
    # Guards of the whole process, too, look for transfers of the user's own.
    with jax.default_device(device) if device is not None else contextlib.nullcontext(), jax.transfer_guard("allow"):
        try:
            loop = _Loop(build(), commands)
        except BaseException as error:
            reply(Outcome(error=error))
            return
        reply(Outcome(loop))
        del build, reply
        loop.run()


def _end(commands: SimpleQueue[Any], thread: threading.Thread) -> None:
    commands.put(None)
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_END_SECONDS)


@functools.cache
def _end_all_at_exit() -> None:
    """Ends all threads before JAX's backends end: functions that are registered later run earlier."""
    atexit.register(lambda: [each.end() for each in list(_all_threads)])
