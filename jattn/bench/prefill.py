"""Causal prefill attention, dense and over a paged cache, next to its peers and to the device's matmul speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from jattn.bench import chunks, dense, mixed, peers
from jattn.bench.batch import HEADS, Batch, dense_call, fa3, ours, packed, random_batch, vllm_triton
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport
from jattn.bench.runner import Benchmark, Mode
from jattn.bench.session import Column, Session, in_graph
from torch_core.base.errors import InvalidInput

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
        fp8: e4m3 queries over an e4m3 cache instead, without dense jattn columns; the ceiling stays bfloat16's.
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
        f"{OURS} dense": lambda batch: dense.ours(dense_call(batch)),
        f"{OURS} paged": ours,
        "cuDNN SDPA dense": lambda batch: dense.sdpa("cudnn", dense_call(batch)),
        "FA2 SDPA dense": lambda batch: dense.sdpa("flash", dense_call(batch)),
    }
    if found is not None:
        calls["FA3 dense"] = lambda batch: dense.fa3(found, dense_call(batch))
        calls["FA3 block 16"] = lambda batch: fa3(found, batch)
        calls["vLLM dense"] = lambda batch: _vllm_dense(found, batch)
        calls["vLLM paged"] = lambda batch: vllm_triton(found, batch, split=False)
    columns = {name: in_graph(call) for name, call in calls.items()}
    if jax_columns:
        columns[f"{OURS} dense in JAX"] = _in_jax(dense.attend)
        columns["cuDNN in JAX dense"] = _in_jax(dense.cudnn)
        columns["cuDNN e4m3 in JAX dense"] = _in_jax(functools.partial(dense.cudnn, call=peers.cudnn_fp8))
    return columns


def _in_jax(attend: Callable[..., Any]) -> Column:
    return lambda batches: dense.in_jax(attend)([dense_call(batch) for batch in batches])


def _vllm_dense(found: Any, batch: Batch) -> Callable[[], Any]:
    key, value = packed(batch)
    return lambda: found.vllm_dense(
        batch.query, key, value, batch.out, batch.starts[:-1], batch.seq_lens, batch.max_query_len, True
    )


_REASON = "--mixed and --chunks have lengths of their own and heads of 128"
BENCHMARK = Benchmark(
    "prefill",
    __doc__,
    run,
    modes=(Mode("--mixed", mixed.BENCHMARK, _REASON), Mode("--chunks", chunks.BENCHMARK, _REASON)),
    draw=draw_fractions,
)
