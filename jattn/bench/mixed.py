"""A serving step with prefill chunks and decode rows in one batch, next to its parts and to FlashAttention-3."""

from __future__ import annotations

from pathlib import Path

from jattn.bench.batch import HEADS, KV_HEADS, Parts, fa3, ours, random_batch
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark
from jattn.bench.session import Session, in_graph

_SIZE = 128
# (sequences, new tokens of each, tokens before them)
_CHUNKS = (8, 512, 4096)
_DECODES = (120, 1, 2047)
_PARTS = {"prefill chunks": (_CHUNKS,), "decode rows": (_DECODES,), "both in one batch": (_CHUNKS, _DECODES)}


def run(*, peers: Path | None = None) -> BenchReport:
    """Measures 8 chunks of 512 tokens on 4,096 earlier ones, 120 decode rows at 2,048 tokens, and both together.

    Args:
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
    """
    session = Session("prefill", peers)
    columns = {OURS: in_graph(ours)}
    if session.peers is not None:
        columns["FA3"] = in_graph(lambda batch: fa3(session.peers, batch))
    chunks, decodes, both = (
        session.add(
            Row(label, bound_us(parts, session.copy, session.matmul), {}),
            columns,
            [random_batch(parts) for _ in range(2)],
            required=columns,
        )
        for label, parts in _PARTS.items()
    )
    together = {name: both.us[name] / (chunks.us[name] + decodes.us[name]) for name in columns}
    values = {f"{name}: together over the sum of the parts": value for name, value in together.items()}
    return session.report("mixed batch", values=values)


def bound_us(parts: Parts, copy: float, matmul: float, *, element_bytes: int = 2) -> float:
    """Returns the microseconds that the device's ceilings allow for (sequences, new tokens, tokens before) parts.

    Args:
        parts: parts of the batch.
        copy: bytes per second.
        matmul: operations per second.
        element_bytes: bytes of an element of the cache.
    """
    # Each part is held by its own ceiling; together they could overlap, which no implementation does.
    total = 0.0
    for seqs, new, before in parts:
        pairs = seqs * new * (before + (new + 1) / 2)
        operations = 4.0 * pairs * HEADS * _SIZE
        moved = 2.0 * element_bytes * seqs * (before + new) * KV_HEADS * _SIZE
        total += max(operations / matmul, moved / copy) * 1e6
    return total


BENCHMARK = Benchmark("mixed", __doc__, run, draw=draw_fractions)
