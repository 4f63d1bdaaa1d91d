"""Causal prefill attention, dense and over a paged cache, next to its peers and to the device's matmul speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from jattn.bench import chunks, measure, mixed, peers
from jattn.bench.batch import HEADS, Batch, dense_call, fa3, ours, packed, random_batch, vllm_triton
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark, Mode
from jattn.bench.session import Column, Session, in_graph
from torch_core import ops
from torch_core.base.errors import InvalidInput

__all__ = ["BENCHMARK", "LENGTHS", "TOTAL_TOKENS", "check_lengths", "run"]

#: Tokens of one sequence in each row of the default table.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: All sequences of a row together.
TOTAL_TOKENS = 16384
_TAKE_FP8 = (f"{OURS} paged", "FA3 block 16", "cuDNN e4m3 in JAX dense")


def run(
    *,
    lengths: Sequence[int] = LENGTHS,
    head_size: Literal[64, 128, 256] = 128,
    fp8: bool = False,
    peers: Path | None = None,
    no_jax: bool = False,
) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 32 query heads, 8 key/value heads, bfloat16, block 16.

    Args:
        lengths: tokens of one sequence in each row; each divides 16384.
        head_size: elements of a head.
        fp8: e4m3 queries over an e4m3 cache instead, without dense columns of ours; the ceiling stays bfloat16's.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and the JAX peers.

    Raises:
        InvalidInput: a length that does not divide `TOTAL_TOKENS`, or no module of peers in the folder.
        Unsupported: torch or JAX has no CUDA device.
    """
    check_lengths(lengths)
    session = Session("prefill", peers)
    columns = _columns(session.peers, not no_jax)
    columns = {name: column for name, column in columns.items() if (name in _TAKE_FP8 if fp8 else "e4m3" not in name)}
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    for length in lengths:
        parts = ((TOTAL_TOKENS // length, length, 0),)
        # Half of the square is masked: two products of 2 operations each on it.
        operations = 2.0 * TOTAL_TOKENS * length * HEADS * head_size
        session.add(
            session.rate_row(str(length), operations),
            columns,
            [random_batch(parts, head_size=head_size, query_dtype=element, cache_dtype=element) for _ in range(2)],
            required=[name for name in columns if name.startswith(OURS)],
        )
    name = f"prefill, causal, {'e4m3, ' if fp8 else ''}heads of {head_size}, TFLOP/s"
    return session.report(name, compared=_compared(fp8))


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuses lengths that do not divide `TOTAL_TOKENS`, by InvalidInput."""
    for length in lengths:
        if length < 1 or TOTAL_TOKENS % length:
            raise InvalidInput(f"--lengths has {length}; each must divide {TOTAL_TOKENS}, the tokens of a row.")


def _compared(fp8: bool) -> Callable[[str], str | None]:
    def compared(name: str) -> str | None:
        if name.startswith(OURS):
            return None
        return f"{OURS} paged" if fp8 or "paged" in name or "block" in name else f"{OURS} dense"

    return compared


def _columns(found: Any, jax_columns: bool) -> dict[str, Column]:
    calls: dict[str, Callable[[Batch], Callable[[], Any]]] = {
        f"{OURS} dense": _dense,
        f"{OURS} paged": ours,
        "cuDNN SDPA dense": lambda batch: _sdpa("cudnn", batch),
        "FA2 SDPA dense": lambda batch: _sdpa("flash", batch),
    }
    if found is not None:
        calls["FA3 dense"] = lambda batch: _fa3_dense(found, batch)
        calls["FA3 block 16"] = lambda batch: fa3(found, batch)
        calls["vLLM dense"] = lambda batch: _vllm_dense(found, batch)
        calls["vLLM paged"] = lambda batch: vllm_triton(found, batch, split=False)
    columns = {name: in_graph(call) for name, call in calls.items()}
    if jax_columns:
        columns[f"{OURS} dense in JAX"] = _dense_in_jax
        columns["cuDNN in JAX dense"] = functools.partial(_cudnn_in_jax, attend=peers.cudnn)
        columns["cuDNN e4m3 in JAX dense"] = functools.partial(_cudnn_in_jax, attend=peers.cudnn_fp8)
    return columns


def _dense(batch: Batch) -> Callable[[], Any]:
    call = replace(dense_call(batch), out=batch.out)
    return lambda: ops.run(call)


def _sdpa(backend: str, batch: Batch) -> Callable[[], Any]:
    attend = peers.sdpa(backend)
    rows = [x.unflatten(0, (-1, batch.max_key_len)).transpose(1, 2) for x in (batch.query, *packed(batch))]
    return lambda: attend(*rows, causal=True)


def _fa3_dense(found: Any, batch: Batch) -> Callable[[], Any]:
    key, value = packed(batch)
    bounds = {"cu_q": batch.starts, "cu_k": batch.starts, "max_q": batch.max_query_len, "max_k": batch.max_key_len}
    return lambda: found.fa3(batch.query, key, value, out=batch.out, **bounds)


def _vllm_dense(found: Any, batch: Batch) -> Callable[[], Any]:
    key, value = packed(batch)
    return lambda: found.vllm_dense(
        batch.query, key, value, batch.out, batch.starts[:-1], batch.seq_lens, batch.max_query_len, True
    )


def _dense_in_jax(batches: list[Batch]) -> float:
    from jattn import ops

    length = batches[0].max_query_len

    def attend(query: Any, key: Any, value: Any, starts: Any) -> Any:
        return ops.attention(query, key, value, starts, max_query_len=length, implementation="triton")

    return _chained(attend, batches)


def _cudnn_in_jax(batches: list[Batch], attend: Callable[..., Any]) -> float:
    length = batches[0].max_query_len

    def causal(query: Any, key: Any, value: Any, starts: Any) -> Any:
        rows = [x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value)]
        return attend(*rows).reshape(query.shape)

    return _chained(causal, batches)


def _chained(attend: Callable[..., Any], batches: list[Batch]) -> float:
    tensors = [(*packed(batch), batch.starts) for batch in batches]
    return measure.chained_us(attend, batches[0].query, tensors, rotations=4, rounds=5)


_REASON = "--mixed and --chunks have lengths of their own and heads of 128"
BENCHMARK = Benchmark(
    "prefill",
    __doc__,
    run,
    modes=(Mode("--mixed", mixed.BENCHMARK, _REASON), Mode("--chunks", chunks.BENCHMARK, _REASON)),
    draw=draw_fractions,
)
