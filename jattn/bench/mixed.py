"""A serving step with prefill chunks and decode rows in one batch, next to its parts and to FlashAttention-3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jattn.bench import measure, peers
from jattn.bench.report import OURS, BenchReport, Row
from torch_core import ops
from torch_core.specs import AttentionSpec

__all__ = ["Batch", "bound_us", "fa3_call", "random_batch", "run"]

_HEADS, _KV_HEADS, _SIZE, _BLOCK = 32, 8, 128, 16
_SPEC = AttentionSpec(scale=_SIZE**-0.5)
# (sequences, new tokens of each, tokens before them)
_CHUNKS = (8, 512, 4096)
_DECODES = (120, 1, 2047)
_PARTS = {"prefill chunks": (_CHUNKS,), "decode rows": (_DECODES,), "both in one batch": (_CHUNKS, _DECODES)}


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of a server over a paged cache: 32 query heads, 8 key/value heads of 128, bfloat16, block 16.

    Attributes:
        query: [tokens, 32, 128].
        kv_cache: [blocks, 2, 16, 8, 128].
        block_tables: int32 [sequences, blocks of the longest one].
        seq_lens: int32 [sequences].
        starts: query_start_loc, int32 [sequences + 1].
        out: an output like the query.
        max_query_len: new tokens of the longest query.
        max_key_len: tokens of the longest sequence.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    max_query_len: int
    max_key_len: int


def run(*, peers_directory: Path | None = None) -> BenchReport:
    """Measures 8 chunks of 512 tokens on 4,096 earlier ones, 120 decode rows at 2,048 tokens, and both together.

    Args:
        peers_directory: see `jattn.bench.peers.load_peers`.

    Raises:
        Unsupported: torch or JAX has no CUDA device.
    """
    measure.require_cuda("prefill")
    found = peers.load_peers(peers_directory)
    copy, matmul = measure.copy_bytes_per_second(), measure.matmul_flops()
    rows = []
    for label, parts in _PARTS.items():
        steps = [random_batch(parts) for _ in range(2)]
        times = {OURS: measure.graph_us([_ours(step) for step in steps])}
        if found is not None:
            times["FA3"] = measure.graph_us([fa3_call(found, step) for step in steps])
        rows.append(Row(label, bound_us(parts, copy, matmul), times))
        del steps
    together = {name: rows[2].us[name] / (rows[0].us[name] + rows[1].us[name]) for name in rows[2].us}
    return BenchReport(
        name="mixed batch",
        device=measure.device_name(),
        versions=measure.versions(),
        copy_bytes_per_second=copy,
        matmul_flops=matmul,
        rows=tuple(rows),
        values={f"{name}: together over the sum of the parts": value for name, value in together.items()},
    )


def bound_us(parts: tuple[tuple[int, int, int], ...], copy: float, matmul: float) -> float:
    """Returns the microseconds that the device's ceilings allow for (sequences, new tokens, tokens before) parts."""
    # Each part is held by its own ceiling; together they could overlap, which no implementation does.
    total = 0.0
    for seqs, new, before in parts:
        pairs = seqs * new * (before + (new + 1) / 2)
        operations = 4.0 * pairs * _HEADS * _SIZE
        moved = 4.0 * seqs * (before + new) * _KV_HEADS * _SIZE
        total += max(operations / matmul, moved / copy) * 1e6
    return total


def random_batch(parts: tuple[tuple[int, int, int], ...]) -> Batch:
    """Makes a batch of (sequences, new tokens of each, tokens before them) parts, its blocks in random order."""
    query_lens = [new for seqs, new, _ in parts for _ in range(seqs)]
    key_lens = [new + before for seqs, new, before in parts for _ in range(seqs)]
    blocks = [math.ceil(n / _BLOCK) for n in key_lens]
    cache = torch.randn(sum(blocks) + 1, 2, _BLOCK, _KV_HEADS, _SIZE, device="cuda", dtype=torch.bfloat16)
    free = torch.randperm(sum(blocks), device="cuda").int() + 1
    tables = torch.zeros(len(blocks), max(blocks), device="cuda", dtype=torch.int32)
    for seq, part in enumerate(free.split(blocks)):
        tables[seq, : len(part)] = part
    query = torch.randn(sum(query_lens), _HEADS, _SIZE, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().cuda()
    return Batch(
        query=query,
        kv_cache=cache,
        block_tables=tables,
        seq_lens=torch.tensor(key_lens, dtype=torch.int32, device="cuda"),
        starts=starts,
        out=torch.empty_like(query),
        max_query_len=max(query_lens),
        max_key_len=max(key_lens),
    )


def _ours(step: Batch) -> Callable[[], Any]:
    return lambda: ops.paged_attention(
        step.query,
        step.kv_cache,
        step.block_tables,
        step.seq_lens,
        step.starts,
        spec=_SPEC,
        max_query_len=step.max_query_len,
        out=step.out,
    )


def fa3_call(found: Any, step: Batch) -> Callable[[], Any]:
    """Returns the call of FlashAttention-3 on a batch; `found` is what `jattn.bench.peers.load_peers` returned."""
    key, value = step.kv_cache.unbind(1)
    bounds = {"cu_q": step.starts, "max_q": step.max_query_len, "max_k": step.max_key_len, "seq_lens": step.seq_lens}
    return lambda: found.fa3(step.query, key, value, out=step.out, block_table=step.block_tables, **bounds)
