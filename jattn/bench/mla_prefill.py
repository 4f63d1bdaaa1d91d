"""Prompts of multi-head latent attention in the plain form, keys of 192 and values of 128 elements, next to peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jattn.bench import measure, peers
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark
from jattn.bench.session import Column, Session, in_graph
from torch_core.attention.call import DenseCall
from torch_core.base.specs import AttentionSpec
from torch_core.launch.run import run as run_call

__all__ = ["BENCHMARK", "HEADS", "KEY_SIZE", "LENGTHS", "VALUE_SIZE", "prompt_call", "run"]

#: Tokens of one sequence in each row.
LENGTHS = (1024, 2048, 4096, 8192, 16384)
#: Heads of queries, keys and values, and their elements.
HEADS, KEY_SIZE, VALUE_SIZE = 16, 192, 128
_TOTAL_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Prompts:
    """Sequences of one length, side by side: every head has keys and values of its own, as latents are expanded."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    starts: torch.Tensor
    length: int
    out: torch.Tensor


def run(*, lengths: Sequence[int] = LENGTHS, peers: Path | None = None, no_jax: bool = False) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 16 heads, bfloat16, causal.

    Args:
        lengths: tokens of one sequence in each row; each divides 16384.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and cuDNN through JAX.
    """
    session = Session("mla", peers)
    for length in lengths:
        # Half of the square is masked: two operations for each product of it.
        operations = float(_TOTAL_TOKENS * length * HEADS * (KEY_SIZE + VALUE_SIZE))
        session.add(
            session.rate_row(str(length), operations),
            _columns(session.peers, not no_jax),
            [_prompts(length) for _ in range(2)],
            required=(OURS,),
        )
    return session.report(
        "latent attention, prompts, heads of 192 and values of 128, TFLOP/s",
        compared=lambda name: None if name == OURS else OURS,
    )


def prompt_call(length: int) -> DenseCall[torch.Tensor]:
    """Returns the causal attention of random prompts, 16k tokens in sequences of one length."""
    return _call(_prompts(length))


def _prompts(length: int) -> Prompts:
    query, key, value = (
        torch.randn(_TOTAL_TOKENS, HEADS, size, device="cuda", dtype=torch.bfloat16)
        for size in (KEY_SIZE, KEY_SIZE, VALUE_SIZE)
    )
    starts = torch.arange(0, _TOTAL_TOKENS + 1, length, device="cuda", dtype=torch.int32)
    return Prompts(query, key, value, starts, length, torch.empty_like(value))


def _columns(found: Any, jax_columns: bool) -> dict[str, Column]:
    columns = {OURS: in_graph(_ours), "cuDNN SDPA": in_graph(_sdpa)}
    if found is not None:
        columns["FA3"] = in_graph(lambda batch: _fa3(found, batch))
    if jax_columns:
        columns[f"{OURS} in JAX"] = _ours_in_jax
        columns["cuDNN in JAX"] = _cudnn_in_jax
    return columns


def _call(batch: Prompts) -> DenseCall[torch.Tensor]:
    return DenseCall(
        query=batch.query,
        key=batch.key,
        value=batch.value,
        query_start_loc=batch.starts,
        key_start_loc=batch.starts,
        spec=AttentionSpec(scale=KEY_SIZE**-0.5),
        max_query_len=batch.length,
        max_key_len=batch.length,
    )


def _ours(batch: Prompts) -> Callable[[], Any]:
    call = replace(_call(batch), out=batch.out)
    return lambda: run_call(call)


def _sdpa(batch: Prompts) -> Callable[[], Any]:
    attend = peers.sdpa("cudnn")
    rows = [x.unflatten(0, (-1, batch.length)).transpose(1, 2) for x in (batch.query, batch.key, batch.value)]
    return lambda: attend(*rows, causal=True)


def _fa3(found: Any, batch: Prompts) -> Callable[[], Any]:
    bounds = {"cu_q": batch.starts, "cu_k": batch.starts, "max_q": batch.length, "max_k": batch.length}
    return lambda: found.fa3(batch.query, batch.key, batch.value, out=batch.out, **bounds)


def _ours_in_jax(batches: list[Prompts]) -> float:
    from jattn import ops

    length = batches[0].length

    def attend(query: Any, key: Any, value: Any, starts: Any) -> Any:
        return ops.attention(query, key, value, starts, max_query_len=length, implementation="triton")

    return _chained(attend, batches)


def _cudnn_in_jax(batches: list[Prompts]) -> float:
    length = batches[0].length

    def attend(query: Any, key: Any, value: Any, starts: Any) -> Any:
        rows = [x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value)]
        return peers.cudnn(*rows).reshape(value.shape)

    return _chained(attend, batches)


def _chained(attend: Callable[..., Any], batches: list[Prompts]) -> float:
    arrays = [(batch.key, batch.value, batch.starts) for batch in batches]
    return measure.chained_us(measure.fed(attend), batches[0].query, arrays, rotations=4, rounds=5)


BENCHMARK = Benchmark("mla-prefill", __doc__, run, draw=draw_fractions)
