"""Runs a torch function inside a jitted JAX program on XLA's own buffers, in place and without a copy.

This is the CPU path and, on CUDA, the debug and cross-check path. There Python runs for each call, or once for each
call site where the call can be captured. The serving path on CUDA is `jattn.bridge.native`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.experimental.buffer_callback import buffer_callback
from torch._C import _from_dlpack

from jattn.bridge.in_place import pinned

__all__ = ["call_torch", "original_error", "recorded", "typed_errors"]


def call_torch(
    function: Callable[..., None],
    arguments: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: Mapping[int, int] | None = None,
    num_threads: int | None = None,
    capturable: bool = False,
) -> list[jax.Array]:
    """Calls `function(*input_tensors, *output_tensors)` from inside a JAX program.

    Every tensor is a view of XLA's buffer and is valid during the call only. The function must write each output
    completely, must not write an input that is not aliased, must not keep a tensor, and must neither call JAX nor
    wait for the device. An aliased output is the same memory as its input, so only the input is passed.

    Args:
        function: a torch function that returns None. Outside jit, calls with equal functions compile once: pass a
            module-level function or a frozen dataclass, not a new lambda each time.
        arguments: the JAX arrays it reads.
        outputs: shape and dtype of each array it writes.
        aliases: which argument index (key) is updated in place as which output index (value).
        num_threads: torch's thread count during the call on CPU; None leaves it. Small work wants 1: XLA's own
            threads wait on the same cores, and a team of OpenMP threads woken for microseconds costs far more.
            A thread that first uses torch during the call starts with this count: torch hands down the latest one.
        capturable: XLA may record what the function launches on CUDA into a graph and replay it without the function:
            it must launch something, allocate nothing, and launch the same for the same shapes. Otherwise a replay
            would use memory that torch has long given to somebody else.

    Returns:
        The outputs, in order.

    Raises:
        Exception: outside jit, what `function` raised. A jitted program raises jax.errors.JaxRuntimeError or
            ValueError; run it inside `typed_errors` to get the function's own exception.
    """
    aliases = dict(aliases or {})
    own_outputs = tuple(index for index in range(len(outputs)) if index not in aliases.values())
    call = buffer_callback(
        _TorchCallback(function, own_outputs, num_threads),
        list(outputs),
        input_output_aliases=aliases,
        command_buffer_compatible=capturable,
    )
    with typed_errors():
        return pinned(call(*pinned(arguments, aliases)), aliases.values())


class typed_errors:  # noqa: N801 (used as contextlib's own managers are)
    """Re-raises what a torch function raised inside a JAX program as itself, not as the error that JAX makes of it.

    Wait for the program's results inside the block: JAX reports a failure only when somebody looks.

    Raises:
        Exception: whatever the torch function raised, KeyboardInterrupt included; where it happened stands in a note.
            The first look at a failure gives the very object, a later one a copy.
    """

    def __enter__(self) -> None:
        pass

    # No generator: from Python 3.13 on contextlib's `__exit__` and an error that becomes another one there keep each
    # other, and so whatever the frames between hold.
    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        original = error if error is None else original_error(error)
        try:
            if original is not None and original is not error:
                raise original from None
        finally:
            # An error and a frame that it passed would be a cycle, and keep what the other frames hold.
            del original, error, frames


def original_error(error: BaseException) -> BaseException:
    """Returns what a torch function raised, if `error` is what JAX made of it, else the error itself."""
    # A program's first run raises a JaxRuntimeError, JAX's fast dispatch of later runs a plain ValueError.
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
        return _recorded.find(str(error)) or error
    return error


def recorded(error: BaseException) -> RuntimeError:
    """Returns what to raise into XLA in place of an error, so that `typed_errors` finds it again.

    XLA turns any exception into text, KeyboardInterrupt too.
    """
    return RuntimeError(f"{type(error).__name__}: {error} [{_recorded.put(error)}]")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _TorchCallback:
    """One call site: turns buffers into tensors, runs the function where XLA expects it, keeps what it raised.

    Equal call sites compare equal, so that calls outside jit find their compiled program again.
    """

    function: Callable[..., None]
    own_outputs: tuple[int, ...]
    num_threads: int | None

    def __call__(self, context: Any, outputs: Sequence[Any], *arguments: Any) -> None:
        try:
            self._run(context, outputs, arguments)
        except BaseException as error:
            del context, outputs, arguments
            _drop_frames(error)
            raise recorded(error) from error

    def _run(self, context: Any, outputs: Sequence[Any], arguments: Sequence[Any]) -> None:
        # The converter itself: torch.from_dlpack asks the buffer for its device and stream first, which takes longer
        # than the import and is ignored by XLA's buffers. A decode layer imports nine buffers.
        tensors = [_from_dlpack(buffer.__dlpack__()) for buffer in arguments]
        tensors += [_from_dlpack(outputs[index].__dlpack__()) for index in self.own_outputs]
        if tensors[0].is_cuda:
            with torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=tensors[0].device)):
                self.function(*tensors)
        else:
            _run_on_cpu(self.function, tensors, self.num_threads)


def _drop_frames(error: BaseException) -> None:
    """Makes notes of the tracebacks of an error and of those behind it.

    Their frames hold views of buffers that XLA takes back now and, through their callers, all that those hold.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            note = "In the callback:\n" + "".join(traceback.format_tb(link.__traceback__)).rstrip()
            # An error object may be raised more than once.
            if note not in getattr(link, "__notes__", ()):
                link.add_note(note)
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
            pending += [link.__cause__, link.__context__]


def _run_on_cpu(function: Callable[..., None], tensors: list[torch.Tensor], num_threads: int | None) -> None:
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        function(*tensors)
        return
    torch.set_num_threads(num_threads)
    try:
        function(*tensors)
    finally:
        torch.set_num_threads(before)


class _RecordedErrors:
    """The last few exceptions raised inside callbacks, by the key that their message carries through XLA."""

    _CAPACITY = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._errors: OrderedDict[str, BaseException] = OrderedDict()

    def put(self, error: BaseException) -> str:
        with self._lock:
            key = f"jattn-callback-error-{next(self._numbers)}"
            self._errors[key] = error
            while len(self._errors) > self._CAPACITY:
                self._errors.popitem(last=False)
            return key

    def find(self, text: str) -> BaseException | None:
        with self._lock:
            for key in re.findall(r"jattn-callback-error-\d+", text):
                if (error := self._errors.pop(key, None)) is not None:
                    # Each output of a failed program raises the same text. The next look at it gets a copy: what is
                    # handed out gathers the frames of all whom it passes, and a kept one would keep what they hold.
                    with contextlib.suppress(Exception):
                        self._errors[key] = copy.copy(error)
                    return error
        return None


# XLA carries nothing but text out of a callback, so the objects need a place outside any call: this one, bounded.
_recorded = _RecordedErrors()
