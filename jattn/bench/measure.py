"""How the CUDA benchmarks take time, and the ceilings of the device that they are compared with."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.profiler import ProfileData
from torch.profiler import ProfilerActivity, profile

from jattn.bridge import to_jax
from jattn.table import aligned
from torch_core.base.errors import Unsupported

# Several times the largest L2 in use, so that a rotation over the pools never finds its data there.
_COLD_BYTES = 512 << 20
_CALLS_PER_GRAPH = 16
# A graph of this length is long compared with the resolution of events; 16 calls of 20 ms would only take time.
_GRAPH_US = 5000.0
# The same of a JAX program, which the host starts meanwhile.
_PROGRAM_US = 2000.0
# The largest factor of its length, also if the host's time hides its own.
_MOST_LONGER = 64
_MAX_POOLS = 64
_WARM_UP_RUNS = 5
# Programs of a short and of a long row.
_RUNS_IN_FLIGHT = (4, 16)
_REST_SECONDS = 0.3
# Kernels of a table.
_SHOWN = 24


def require_cuda(name: str) -> None:
    """Raises Unsupported unless torch and JAX both have a CUDA device."""
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        raise Unsupported(
            f"jattn bench {name} measures CUDA kernels and needs a CUDA device in torch and in JAX; torch has "
            f"{'one' if torch.cuda.is_available() else 'none'} and JAX runs on {jax.default_backend()!r}. "
            "`jattn bench generate` measures a CPU."
        )


def num_pools(pool_bytes: int) -> int:
    """Returns how many pools of this size a rotation needs so that each is cold when its turn comes."""
    return max(2, min(_MAX_POOLS, -(-_COLD_BYTES // max(1, pool_bytes))))


def rest() -> None:
    """Rests, so that the device's power limit no longer depends on earlier work.

    Clocks fall under load and recover in idle: without a rest the second kernel takes up to 1.12 times as long.
    """
    time.sleep(_REST_SECONDS)


def graph_us(calls: Sequence[Callable[[], Any]], *, rounds: int = 9) -> float:
    """Returns microseconds of one call under CUDA graph replay, median over rounds.

    A graph holds whole rotations over `calls`, which differ in the memory that they touch. Launch gaps between the
    nodes of a graph are counted, the host is not.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    once = eager_us(lambda: [call() for call in calls], rounds=1)
    rotations = max(1, min(_CALLS_PER_GRAPH // len(calls), math.ceil(_GRAPH_US / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rotations):
            for call in calls:
                call()
    # The calls until here have used some of the power that the device has at its highest clock.
    rest()
    return eager_us(graph.replay, rounds=rounds) / (rotations * len(calls))


def eager_us(call: Callable[[], Any], *, rounds: int = 9) -> float:
    """Returns microseconds between events around a call, median over rounds; for calls that a graph cannot capture."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def jax_us(
    program: Callable[..., Any], arguments: Sequence[Any], *, calls: int, rounds: int = 9, donated: Any = None
) -> float:
    """Returns microseconds of one of the `calls` that a jitted program chains, median over rounds.

    Programs are dispatched one after the other without waiting, as a generation loop does; the host's time counts if it
    is slower than the device. The time at both ends of a sequence of programs, until the first one runs and until the
    host learns that the last one ended, is equal in short and long sequences, and cancels in their difference: a loop
    has it once for thousands of steps, and events around a replayed graph do not include it.

    With `donated` a run's last argument is the result of the one before, first `donated` itself: results that lie where
    they lay spare XLA an update of its command buffers.
    """

    def run(last: Any) -> Any:
        return program(*arguments) if donated is None else program(*arguments, last)

    results = [donated]
    # Compile, capture the command buffer, replay it.
    for _ in range(_WARM_UP_RUNS):
        results = [jax.block_until_ready(run(results[-1]))]

    def seconds(programs: int) -> float:
        started = time.perf_counter()
        for _ in range(programs):
            results.append(run(results[-1]))
        jax.block_until_ready(results[-1])
        ended = time.perf_counter()
        del results[:-1]
        return ended - started

    short, long = _RUNS_IN_FLIGHT
    times = [seconds(long) - seconds(short) for _ in range(rounds)]
    return statistics.median(times) * 1e6 / ((long - short) * calls)


def chained_us(
    attend: Callable[..., Any],
    query: torch.Tensor,
    tensors: Sequence[Sequence[torch.Tensor]],
    *,
    rotations: int,
    rounds: int = 9,
) -> float:
    """Returns microseconds of one JAX call, each on the result of the one before, so that nothing runs side by side.

    `attend(query, *arrays)` returns the next query; `tensors` are the other arrays of each call of one rotation, of
    which a program has `rotations`, and more if those are over sooner than the host starts a program (about 0.3 ms
    and 3 us a call on an H200's machine): a model's step is longer, too. A program's result takes the place of the
    query, as a donated cache does.
    """

    def program(arrays: Any, query: Any, *, rotations: int) -> Any:
        for array in arrays * rotations:
            query = attend(query, *array)
        return query

    arrays = [tuple(to_jax(tensor) for tensor in group) for group in tensors]

    def measured(rotations: int, rounds: int) -> float:
        jitted = jax.jit(functools.partial(program, rotations=rotations), donate_argnums=1)
        # Not torch's own memory, which cannot be given away.
        own = jnp.array(to_jax(query), copy=True)
        return jax_us(jitted, (arrays,), calls=rotations * len(arrays), rounds=rounds, donated=own)

    found = measured(rotations, rounds)
    took = max(found * rotations * len(arrays), _PROGRAM_US / _MOST_LONGER)
    longer = math.ceil(_PROGRAM_US / took)
    return found if longer == 1 else measured(rotations * longer, rounds)


def fed(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call for `chained_us` whose result is the query with one element of `attend`'s result, at rank 3."""

    def step(query: Any, *arrays: Any) -> Any:
        # One element, so that the next call waits for this one.
        return jax.lax.dynamic_update_slice(query, attend(query, *arrays)[:1, :1, :1], (0, 0, 0))

    return step


def kernels_us(call: Callable[[], Any]) -> float:
    """Returns microseconds in the kernels of one call, of JAX or torch, without the gaps between them."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        call()
        torch.cuda.synchronize()
    entries = recorded.key_averages()
    return sum(entry.self_device_time_total for entry in entries if entry.device_type.name == "CUDA")


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times of a device's kernels in a trace, in microseconds."""

    #: From the first kernel's start to the last one's end.
    span: float
    #: Time of the span in which a kernel ran.
    busy: float
    #: For each kernel its name, number of runs and total time; the longest first.
    rows: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        idle = 1 - self.busy / self.span if self.span else 0.0
        shown = self.rows[:_SHOWN]
        lines = aligned([(f"{us:.1f} us", f"{n} x", f"{us / n:.2f}", name[:100]) for name, n, us in shown])
        return "\n    ".join([f"  device {self.span / 1e3:.2f} ms, idle {idle:.2%}", *lines])


def profiled(folder: Path, call: Callable[[], Any]) -> KernelTimes | str:
    """Traces a call into a folder and returns the times of its kernels; says so if there is no device to look at."""
    with jax.profiler.trace(str(folder)):
        call()
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = ProfileData.from_file(str(found[-1])).planes if found else ()
    for plane in planes:
        if plane.name.startswith("/device:GPU:0"):
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            return kernel_times((event.name, event.start_ns, event.end_ns) for line in lines for event in line.events)
    return f"  no kernels of a device in {folder}"


def kernel_times(events: Iterable[tuple[str, float, float]]) -> KernelTimes:
    """Sums events, (name, start, end) in nanoseconds, that may overlap.

    Example:
        >>> kernel_times([("a", 0, 2000), ("b", 1000, 3000), ("a", 5000, 6000)])
        KernelTimes(span=6.0, busy=4.0, rows=(('a', 2, 3.0), ('b', 1, 2.0)))
    """
    ordered = sorted(events, key=lambda event: event[1])
    totals: dict[str, tuple[int, float]] = {}
    busy, reached = 0.0, ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + (end - start) / 1e3
        busy += max(0.0, end - max(start, reached)) / 1e3
        reached = max(reached, end)
    span = (reached - ordered[0][1]) / 1e3 if ordered else 0.0
    rows = sorted(((name, *each) for name, each in totals.items()), key=lambda row: -row[2])
    return KernelTimes(span, busy, tuple(rows))


def copy_bytes_per_second() -> float:
    """Measures a large device-to-device copy; bytes read plus bytes written."""
    # Not in a graph: there a copy becomes a memcpy node, which runs at two thirds of the speed.
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / eager_us(lambda: target.copy_(source)) * 1e6


def jax_copy_bytes_per_second() -> float:
    """Measures the same of a JAX program, in a process whose memory JAX manages."""
    source = jnp.ones(1 << 28, jnp.int32)
    return 2 * source.nbytes / jax_us(jax.jit(lambda x: x + 1), (source,), calls=1) * 1e6


def matmul_flops(size: int = 8192) -> float:
    """Measures a large bfloat16 matrix product on random data; operations per second."""
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    return 2 * size**3 / graph_us([lambda: torch.mm(left, right, out=out)]) * 1e6


def device_name() -> str:
    """Returns the name of the current CUDA device."""
    return torch.cuda.get_device_name()
