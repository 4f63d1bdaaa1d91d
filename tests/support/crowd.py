"""Processes that share a CUDA device: some keep it busy, others run attention beside them and say what they found.

A kernel that meets the end of its process's share of time is stopped at any instruction and goes on later. What fails
then is a CUDA error, which a process keeps for good: so whatever may fail has a process of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from torch_core import ops
from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall
from torch_core.base.specs import AttentionSpec
from torch_core.launch.launcher import device_limits
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

__all__ = ["KINDS", "Guest", "Work", "attention", "busy_device"]

#: What a process with `attention` repeats.
KINDS: tuple[str, ...] = ("prefill", "backward")
_TOKENS, _HEADS, _KV_HEADS = 16384, 32, 8
# Rows of a square product of about 2 ms, and how many of them are asked for before they are waited for.
_SQUARE, _AHEAD = 8192, 4
# Seconds without an answer after which a process counts as stuck, and those that it has for ending by itself.
_STUCK, _END = 120.0, 20.0


class Work(NamedTuple):
    """What a process does.

    Attributes:
        answer: its answer to a question.
        idle: what it does over and over from its first answer on while nobody asks.
    """

    answer: Callable[[Any], str]
    idle: Callable[[], None] | None = None


class Guest:
    """A process that answers questions; one that fails is followed by a fresh one.

    Args:
        make: gives the process its work; called there with `args`. What it raises is the answer to the first question.
        *args: more for it.
    """

    def __init__(self, make: Callable[..., Work], *args: Any) -> None:
        self._work = (make, args)
        self._start()

    def ask(self, question: Any) -> str:
        """Returns the answer, or how the process failed: by which error, stuck, or by its end."""
        try:
            self._end.send(question)
            if self._end.poll(_STUCK):
                lives, text = self._end.recv()
            else:
                lives, text = False, f"no answer in {_STUCK:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join(_END)
            lives, text = False, f"ended with exit code {self._process.exitcode}"
        if not lives:
            self.close()
            self._start()
        return text

    def close(self) -> None:
        """Ends the process, at its own time if that is soon."""
        self._end.close()
        self._process.join(_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, *self._work), daemon=True)
        self._process.start()
        other.close()


@contextlib.contextmanager
def busy_device(processes: int) -> Iterator[Callable[[], None]]:
    """Makes processes that, once the function that this gives is called, keep the device busy with matrix products."""
    guests = [Guest(_products) for _ in range(processes)]

    def start() -> None:
        found = [guest.ask("multiply") for guest in guests]
        if set(found) != {"busy"}:
            raise RuntimeError(f"processes that should keep the device busy: {found}")

    try:
        yield start
    finally:
        for guest in guests:
            guest.close()


def attention(head_size: int, value_head_size: int) -> Work:
    """Runs each of KINDS once; to (kind, runs) the answer is whether the bits of so many runs are equal to those."""
    forward, backward = _calls(head_size, value_head_size)
    calls = dict(zip(KINDS, (forward, backward), strict=True))
    first = {kind: _bits(call) for kind, call in calls.items()}
    torch.cuda.synchronize()

    def answer(question: tuple[str, int] | None) -> str:
        if question is None:
            return "ready"
        kind, runs = question
        for run in range(runs):
            found = _bits(calls[kind])
            changed = [name for name, bits in found.items() if not torch.equal(bits, first[kind][name])]
            if changed:
                return f"run {run}: other bits in {', '.join(changed)}"
        return "equal bits"

    return Work(answer)


def _products() -> Work:
    left, right, product = (torch.zeros(_SQUARE, _SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def multiply() -> None:
        for _ in range(_AHEAD):
            torch.mm(left, right, out=product)
        torch.cuda.synchronize()

    def answer(_: Any) -> str:
        multiply()
        return "busy"

    return Work(answer, multiply)


def _serve(end: Connection, make: Callable[..., Work], args: tuple[Any, ...]) -> None:
    # A pipe that has ended: nobody asks any more.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            work = make(*args)
            end.send((True, work.answer(end.recv())))
            while True:
                while work.idle is not None and not end.poll():
                    work.idle()
                end.send((True, work.answer(end.recv())))
        except RuntimeError as error:
            # Of a CUDA error the first line says which.
            end.send((False, f"{type(error).__name__}: {str(error).splitlines()[0]}"))


def _bits(call: DenseCall[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.view(torch.int32 if name == "lse" else torch.int16) for name, x in ops.run(call).items()}


def _calls(head_size: int, value_head_size: int) -> tuple[DenseCall[torch.Tensor], DenseBackwardCall[torch.Tensor]]:
    """The forward and the backward call of one causal sequence, long enough to be stopped in the midst of it."""
    generator = torch.Generator("cuda").manual_seed(head_size)

    def normal(heads: int, size: int) -> torch.Tensor:
        return torch.randn(_TOKENS, heads, size, generator=generator, device="cuda", dtype=torch.bfloat16)

    starts = torch.tensor([0, _TOKENS], dtype=torch.int32, device="cuda")
    forward = DenseCall(
        query=normal(_HEADS, head_size), key=normal(_KV_HEADS, head_size), value=normal(_KV_HEADS, value_head_size),
        query_start_loc=starts, key_start_loc=starts, max_query_len=_TOKENS, with_lse=True,
        spec=AttentionSpec(scale=head_size**-0.5),
    )  # fmt: skip
    results = ops.run(forward)
    backward = backward_of(forward, out=results["out"], lse=results["lse"], d_out=normal(_HEADS, value_head_size))
    limits = device_limits(torch.device("cuda", 0))
    names = {launch.name for call in (forward, backward) for launch in plan_call(call.map(array_spec), limits).launches}
    if not {"hopper_prefill_kernel", "hopper_backward_kernel"} <= names:
        raise RuntimeError(f"the kernels for Hopper do not serve these calls: {sorted(names)}")
    return forward, backward
