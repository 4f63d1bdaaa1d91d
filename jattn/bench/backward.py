"""A step of training through causal dense attention, its passes apart or together, next to cuDNN, FA2 and FA4."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import torch

from jattn.bench import measure, mla
from jattn.bench.batch import HEADS, dense_batch, dense_call, dense_rows, ours_in_jax, random_batch, segments_in_jax
from jattn.bench.peers import cudnn, load_fa4, sdpa
from jattn.bench.pictures import draw_fractions
from jattn.bench.prefill import LENGTHS, TOTAL_TOKENS, check_lengths
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark
from jattn.bench.session import Column, Session, in_graph
from jattn.bridge import to_jax
from torch_core import ops
from torch_core.attention.backward_call import DenseBackwardCall, backward_of
from torch_core.attention.call import DenseCall
from torch_core.attention.kernels.backward.plan import backward_plan
from torch_core.base.errors import InvalidInput
from torch_core.launch.launcher import device_limits, run_operation
from torch_core.launch.tensors import array_spec

# Matrix products of each: along the elements of a key, and of a value.
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}


def run(
    *,
    lengths: Sequence[int] = LENGTHS,
    head_size: Literal[64, 128, 192, 256] = 128,
    passes: Literal["forward", "backward", "both"] = "backward",
    both: bool = False,
    peers: bool = False,
    dropout: float = 0.0,
    segments: bool = False,
) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 32 query heads, 8 key/value heads, bfloat16.

    Args:
        lengths: tokens of one sequence in each row; each divides 16384.
        head_size: elements of a head; 192 for DeepSeek's prompts, 16 heads with values of 128.
        passes: the timed passes of a training step.
        both: the same as passes "both".
        peers: measure cuDNN and FlashAttention-2, of JAX and of torch, too, and FlashAttention-4 if it is installed.
        dropout: also measure torch's call with dropout at this rate, if it is above 0.
        segments: also measure the sequences as segments of one packed row, by segment_ids.
    """
    check_lengths(lengths)
    if not 0 <= dropout < 1:
        raise InvalidInput(f"--dropout is {dropout}; it must be 0, for none, or the share of weights that go, below 1.")
    passes = "both" if both else passes
    session = Session("backward")
    step = _Step(passes)
    columns: dict[str, Column] = {OURS: in_graph(lambda call: step.ours(call, ops.run))}
    if dropout:
        columns[f"{OURS} dropout"] = in_graph(lambda call: step.ours(_dropping(call, dropout), ops.run))
        if peers:
            columns["FA2 SDPA dropout"] = lambda calls: step.sdpa("flash", calls[0], dropout)
    if segments:
        columns[f"{OURS} segments"] = in_graph(lambda call: step.ours(_segmented(call), ops.run))
        columns[f"{OURS} segments in JAX"] = lambda calls: step.in_jax(
            calls[0], segments_in_jax, _segmented(calls[0]).segment_ids
        )
    if passes != "forward":
        columns[f"{OURS} in any order"] = in_graph(lambda call: step.ours(replace(call, deterministic=False), ops.run))
        columns[f"{OURS} portable"] = in_graph(lambda call: step.ours(call, _portable))
    if peers:
        columns["cuDNN in JAX"] = lambda calls: step.in_jax(calls[0], cudnn)
        columns["FA2 SDPA"] = lambda calls: step.sdpa("flash", calls[0])
        columns["cuDNN SDPA"] = lambda calls: step.sdpa("cudnn", calls[0])
        if (fa4 := load_fa4()) is not None:
            columns["FA4"] = in_graph(lambda call: step.fa4(fa4, call, deterministic=True))
            if passes != "forward":
                columns["FA4 in any order"] = in_graph(lambda call: step.fa4(fa4, call, deterministic=False))
    columns[f"{OURS} in JAX"] = lambda calls: step.in_jax(calls[0], ours_in_jax)
    heads, value_size = HEADS, head_size
    if head_size == mla.KEY_SIZE:
        heads, value_size = mla.PROMPT_HEADS, mla.VALUE_SIZE
    by_key, by_value = _PRODUCTS[passes]
    for length in lengths:
        # Half of the square is masked, and each product of it is two operations.
        operations = 1.0 * TOTAL_TOKENS * length * heads * (by_key * head_size + by_value * value_size)
        session.add(session.rate_row(str(length), operations), columns, [_call(head_size, length)], required=(OURS,))
    name = "forward and backward" if passes == "both" else passes
    values = f" over values of {value_size}" if value_size != head_size else ""
    return session.report(f"{name}, causal, heads of {head_size}{values}, TFLOP/s", compared=_compared)


def _compared(name: str) -> str | None:
    return None if name.startswith(OURS) else OURS


class _Step:
    """The timed part of a training step: its forward pass, its backward pass, or both."""

    def __init__(self, passes: str) -> None:
        self._forward_only, self._both = passes == "forward", passes == "both"

    def ours(
        self, call: DenseCall[torch.Tensor], backward: Callable[[DenseBackwardCall[torch.Tensor]], Any]
    ) -> Callable[[], Any]:
        d_out = _d_out(call)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            results = ops.run(replace(call, with_lse=True))
            return results["out"], results["lse"]

        if self._forward_only:
            return forward
        kept = forward()

        def step() -> Any:
            out, lse = forward() if self._both else kept
            return backward(backward_of(call, out=out, lse=lse, d_out=d_out))

        return step

    def sdpa(self, backend: str, call: DenseCall[torch.Tensor], dropout: float = 0.0) -> float:
        query, key, value = rows = [x.detach().requires_grad_() for x in dense_rows(call)]

        def forward() -> torch.Tensor:
            return sdpa(backend, query, key, value, causal=True, dropout=dropout)

        kept = forward()
        d_out = torch.randn_like(kept)

        def step() -> Any:
            if self._forward_only:
                return forward()
            out = forward() if self._both else kept
            return torch.autograd.grad(out, rows, d_out, retain_graph=not self._both)

        step()
        return measure.eager_us(step)

    def fa4(self, found: Any, call: DenseCall[torch.Tensor], *, deterministic: bool) -> Callable[[], Any]:
        rows = dense_batch(call)
        d_out = _d_out(call).unflatten(0, (-1, call.max_query_len))

        # By its private functions: autograd would run the backward pass on a stream of its own, which no graph sees.
        def forward() -> Any:
            return found._flash_attn_fwd(*rows, causal=True, return_lse=not self._forward_only)[:2]

        if self._forward_only:
            return forward
        kept = forward()

        def step() -> Any:
            out, lse = forward() if self._both else kept
            return found._flash_attn_bwd(*rows, out, d_out, lse, causal=True, deterministic=deterministic)

        return step

    def in_jax(
        self, call: DenseCall[torch.Tensor], attend: Callable[..., Any], index: torch.Tensor | None = None
    ) -> float:
        rows = [to_jax(x) for x in (call.query, call.key, call.value)]
        d_out = to_jax(_d_out(call))
        # An argument of the programs: XLA would compute with a constant while it compiles.
        places = to_jax(call.query_start_loc if index is None else index)

        def forward(places: Any, *rows: Any) -> Any:
            return attend(*rows, places, call.max_query_len)

        def step(places: Any, rows: Any, d_out: Any) -> Any:
            out, pull = jax.vjp(functools.partial(forward, places), *rows)
            return out, pull(d_out)

        if self._forward_only:
            return measure.jax_us(jax.jit(forward), (places, *rows), calls=1)
        if self._both:
            return measure.jax_us(jax.jit(step), (places, rows, d_out), calls=1)
        _, pull = jax.vjp(functools.partial(jax.jit(forward), places), *rows)
        return measure.jax_us(jax.jit(lambda pull, d_out: pull(d_out)), (pull, d_out), calls=1)


def _call(head_size: int, length: int) -> DenseCall[torch.Tensor]:
    if head_size == mla.KEY_SIZE:
        return mla.prompt_call(length)
    return dense_call(random_batch(((TOTAL_TOKENS // length, length, 0),), head_size=head_size))


def _segmented(call: DenseCall[torch.Tensor]) -> DenseCall[torch.Tensor]:
    """Returns the same sequences, all of one length, as the segments of one row."""
    total, length = call.num_tokens, call.max_query_len
    starts = torch.tensor([0, total], device="cuda", dtype=torch.int32)
    return replace(
        call,
        query_start_loc=starts,
        key_start_loc=starts,
        max_query_len=total,
        max_key_len=total,
        segment_ids=torch.arange(total, device="cuda", dtype=torch.int32) // length + 1,
        max_segments=total // length,
        max_segment_len=length,
    )


def _d_out(call: DenseCall[torch.Tensor]) -> torch.Tensor:
    return torch.randn_like(call.query[..., : call.value_head_size]).contiguous()


def _portable(call: DenseBackwardCall[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the portable backward kernels, even if the call's plan would choose others."""
    plan = backward_plan(call.map(array_spec), device_limits(call.query.device))
    return run_operation(plan, {name: getattr(call, name) for name, _ in plan.inputs})


def _dropping(call: DenseCall[torch.Tensor], rate: float) -> DenseCall[torch.Tensor]:
    seeds = torch.randint(-(1 << 31), 1 << 31, (call.num_seqs, call.num_heads, 2), device="cuda", dtype=torch.int32)
    return replace(call, dropout_rate=rate, dropout_seeds=seeds)


BENCHMARK = Benchmark("backward", __doc__, run, draw=draw_fractions)
