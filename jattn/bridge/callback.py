"""Runs a torch function inside a jitted JAX program on XLA's own buffers, in place and without a copy.

This is the CPU path and, on CUDA, the debug and cross-check path. There Python runs for each call, or once for each
call site if the call can be captured. The serving path on CUDA is `jattn.bridge.native`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.experimental.buffer_callback import buffer_callback
from torch._C import _from_dlpack

from jattn.bridge.calls import pinned
from jattn.bridge.errors import recorded, typed_errors


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
        aliases: output index of each argument index that is updated in place.
        num_threads: torch's thread count during the call on CPU; None leaves it. Small work wants 1: XLA's own
            threads wait on the same cores, and a team of OpenMP threads woken for microseconds costs far more.
            A thread that first uses torch during the call starts with this count: torch passes down the latest one.
        capturable: XLA may record what the function launches on CUDA into a graph and replay it without the function.
            The function must launch at least one kernel, allocate no memory, and launch the same kernels for the same
            shapes. Otherwise a replay would use memory that torch has reused since.

    Returns:
        The outputs, in order.

    Raises:
        Exception: outside jit and on a CPU, the exception of `function`. A jitted program, and any call on a GPU when
            its result is awaited, raises jax.errors.JaxRuntimeError or ValueError; run it, and wait for it, inside
            `typed_errors` to get the function's own exception.
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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _TorchCallback:
    """One call site: converts buffers to tensors, runs the function where XLA expects it, and keeps its exception.

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
    """Makes notes of the tracebacks of an error and of its causes.

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
