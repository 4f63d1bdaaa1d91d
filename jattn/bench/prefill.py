"""Causal prefill attention, dense and over a paged cache, next to its peers and to the device's matmul speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from jattn.bench import batch as batches
from jattn.bench import peers
from jattn.bench.batch import HEADS, KV_HEADS, Batch, Parts, dense_call, fa3, ours, paged_call, random_batch
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, Mode, sizes
from jattn.bench.session import Column, Session, in_graph
from torch_core.attention.call import PagedCall
from torch_core.attention.kernels.hopper.plan import hopper_launch
from torch_core.attention.kernels.hopper_fp8.plan import hopper_fp8_launch
from torch_core.attention.kernels.rows.plan import rows_launch
from torch_core.base.errors import InvalidInput
from torch_core.base.specs import ArraySpec
from torch_core.launch.launcher import run_operation
from torch_core.launch.plan import DeviceLimits, LaunchPlan, OperationPlan
from torch_core.launch.planner import plan_call
from torch_core.launch.tensors import array_spec

#: Tokens of one sequence in each row of the default table.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: All sequences of a row together.
TOTAL_TOKENS = 16384
#: Chunks: sequences and new tokens of each; first batches that fill the device, then some that leave it half empty.
SHAPES = ("64x16", "32x32", "16x64", "8x128", "8x512", "4x32", "1x64", "1x128")
#: Chunks: tokens before the new ones.
CONTEXTS = (2048, 8192)
_TAKE_FP8 = (f"{OURS} paged", "FA3 block 16", "cuDNN e4m3 in JAX dense")
# The mixed batch: (sequences, new tokens of each, tokens before them).
_CHUNKS = (8, 512, 4096)
_DECODES = (120, 1, 2047)
_MIXED = {"prefill chunks": (_CHUNKS,), "decode rows": (_DECODES,), "both in one batch": (_CHUNKS, _DECODES)}


def run(
    *,
    lengths: Sequence[int] = LENGTHS,
    head_size: Literal[64, 128, 256, 512] = 128,
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

    def compared(name: str) -> str | None:
        if name.startswith(OURS):
            return None
        return f"{OURS} paged" if fp8 or "paged" in name or "block" in name else f"{OURS} dense"

    name = f"prefill, causal, {'e4m3, ' if fp8 else ''}heads of {head_size}, TFLOP/s"
    return session.report(name, compared=compared)


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuses lengths that do not divide `TOTAL_TOKENS`, by InvalidInput."""
    for length in lengths:
        if length < 1 or TOTAL_TOKENS % length:
            raise InvalidInput(f"--lengths has {length}; each must divide {TOTAL_TOKENS}, the tokens of a row.")


def _columns(found: Any, jax_columns: bool) -> dict[str, Column]:
    calls: dict[str, Callable[[Batch], Callable[[], Any]]] = {
        f"{OURS} dense": lambda batch: batches.dense_ours(dense_call(batch)),
        f"{OURS} paged": ours,
        "cuDNN SDPA dense": lambda batch: batches.dense_sdpa("cudnn", dense_call(batch)),
        "FA2 SDPA dense": lambda batch: batches.dense_sdpa("flash", dense_call(batch)),
    }
    if found is not None:
        calls["FA3 dense"] = lambda batch: batches.dense_fa3(found, dense_call(batch))
        calls["FA3 block 16"] = lambda batch: fa3(found, batch)
        calls["vLLM dense"] = lambda batch: _vllm_dense(found, batch)
        calls["vLLM paged"] = lambda batch: batches.vllm_triton(found, batch, split=False)
        if (fa4 := peers.load_fa4()) is not None:
            calls["FA4 dense"] = lambda batch: batches.dense_fa4(fa4, dense_call(batch))
            calls["FA4 block 16"] = lambda batch: batches.fa4(fa4, batch)
    columns = {name: in_graph(call) for name, call in calls.items()}
    if jax_columns:
        columns[f"{OURS} dense in JAX"] = _in_jax(batches.ours_in_jax)
        columns["cuDNN in JAX dense"] = _in_jax(peers.cudnn)
        columns["cuDNN e4m3 in JAX dense"] = _in_jax(functools.partial(peers.cudnn, fp8=True))
    return columns


def _in_jax(attend: Callable[..., Any]) -> Column:
    return lambda of_row: batches.dense_in_jax(attend)([dense_call(batch) for batch in of_row])


def _vllm_dense(found: Any, batch: Batch) -> Callable[[], Any]:
    key, value = batches.packed(batch)
    return lambda: found.vllm_dense(
        batch.query, key, value, batch.out, batch.starts[:-1], batch.seq_lens, batch.max_query_len, True
    )


def run_chunks(
    *, shapes: Sequence[str] = SHAPES, contexts: Sequence[int] = CONTEXTS, fp8: bool = False, peers: Path | None = None
) -> BenchReport:
    """Measures chunks by graph replay over cold caches: 32 query heads, 8 key/value heads of 128, bfloat16, block 16.

    Args:
        shapes: "SEQUENCESxNEW" tokens of each row.
        contexts: tokens before the new ones.
        fp8: e4m3 queries over an e4m3 cache.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.

    Returns:
        A row for each shape and context, in microseconds; a column for each of `chunk_plans`, and FA3's.
    """
    session = Session("prefill", peers)
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    for before in contexts:
        for seqs, new in map(sizes, shapes):
            parts = ((seqs, new, before),)
            of_row = batches.cold_batches(parts, query_dtype=element, cache_dtype=element)
            specs: Any = paged_call(of_row[0]).map(array_spec)
            columns = {name: in_graph(functools.partial(_run, plan)) for name, plan in chunk_plans(specs).items()}
            row = Row(f"{seqs} x {new} on {before}", _bound_us(session, parts, element.itemsize), {})
            session.add(row, columns | _fa3_column(session), of_row, required=(OURS,))
    return session.report(f"chunks, {'e4m3, ' if fp8 else ''}us")


def chunk_plans(call: PagedCall[ArraySpec]) -> dict[str, OperationPlan]:
    """Returns the plan of a call and, in one launch each, the kernels that it could choose; needs no device."""
    base = plan_call(call)
    launches = {
        f"{OURS} portable": rows_launch(call, DeviceLimits(), min_query=1),
        f"{OURS} Hopper packed": _hopper_launch(call, pack=call.group),
        f"{OURS} Hopper unpacked": _hopper_launch(call, pack=1),
    }
    forced = {name: replace(base, launches=(launch,), scratch=()) for name, launch in launches.items() if launch}
    return {OURS: base, **forced}


def _hopper_launch(call: PagedCall[ArraySpec], *, pack: int) -> LaunchPlan | None:
    limits = DeviceLimits()
    return hopper_launch(call, limits, min_query=1, pack=pack) or hopper_fp8_launch(
        call, limits, min_query=1, pack=pack
    )


def _run(plan: OperationPlan, batch: Batch) -> Callable[[], Any]:
    arrays = paged_call(batch).arrays()
    return lambda: run_operation(plan, arrays, {"out": batch.out})


def run_mixed(*, peers: Path | None = None) -> BenchReport:
    """Measures 8 chunks of 512 tokens on 4,096 earlier ones, 120 decode rows at 2,048 tokens, and both together.

    Args:
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
    """
    session = Session("prefill", peers)
    columns = {OURS: in_graph(ours)} | _fa3_column(session)
    chunks, decodes, both = (
        session.add(
            Row(label, _bound_us(session, parts), {}),
            columns,
            [random_batch(parts) for _ in range(2)],
            required=columns,
        )
        for label, parts in _MIXED.items()
    )
    together = {name: both.us[name] / (chunks.us[name] + decodes.us[name]) for name in columns}
    values = {f"{name}: together over the sum of the parts": value for name, value in together.items()}
    return session.report("mixed batch", values=values)


def _fa3_column(session: Session) -> dict[str, Column]:
    return {} if session.peers is None else {"FA3": in_graph(lambda batch: fa3(session.peers, batch))}


def _bound_us(session: Session, parts: Parts, element_bytes: int = 2) -> float:
    """Returns the microseconds that the ceilings allow for parts with heads of 128 and a cache of such elements."""
    # Each part is held by its own ceiling; together they could overlap, which no implementation does.
    total = 0.0
    for seqs, new, before in parts:
        pairs = seqs * new * (before + (new + 1) / 2)
        operations = 4.0 * pairs * HEADS * 128
        moved = 2.0 * element_bytes * seqs * (before + new) * KV_HEADS * 128
        total += max(operations / session.matmul, moved / session.copy) * 1e6
    return total


_REASON = "--mixed and --chunks have lengths of their own and heads of 128"
MIXED = Benchmark(
    "mixed",
    "A serving step with prefill chunks and decode rows in one batch, next to its parts and to FlashAttention-3.",
    run_mixed,
    draw=draw_fractions,
)
CHUNKS = Benchmark(
    "chunks",
    "Chunks of new tokens on earlier ones: each kernel that could serve them, next to the plan's choice and to FA3.",
    run_chunks,
    draw=draw_fractions,
)
BENCHMARK = Benchmark(
    "prefill",
    __doc__,
    run,
    modes=(Mode("--mixed", MIXED, _REASON), Mode("--chunks", CHUNKS, _REASON)),
    draw=draw_fractions,
)
