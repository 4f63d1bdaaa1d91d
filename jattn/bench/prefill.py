"""Causal prefill attention, dense and over a paged cache, next to its peers and to the device's matmul speed."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jattn.bench import chunks, measure, mixed, peers
from jattn.bench.report import OURS, BenchReport, Row
from torch_core import ops
from torch_core.specs import AttentionSpec

__all__ = ["HEAD_SIZES", "LENGTHS", "main", "run"]

#: Tokens of one sequence in each row of the default table.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: All sequences of a row together.
TOTAL_TOKENS = 16384
#: Head sizes that the peers have too.
HEAD_SIZES = (64, 128, 256)
_HEADS, _KV_HEADS, _BLOCK = 32, 8, 16


@dataclass(frozen=True, slots=True)
class _Batch:
    # Packed sequences of one length, and the same keys and values in a paged cache.
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    length: int

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(scale=self.query.shape[-1] ** -0.5)


def run(
    *,
    lengths: Sequence[int] = LENGTHS,
    head_size: int = 128,
    fp8: bool = False,
    peers_directory: Path | None = None,
    jax_columns: bool = True,
) -> BenchReport:
    """Measures 16k tokens in sequences of each length: 32 query heads, 8 key/value heads, bfloat16, block 16.

    Args:
        lengths: tokens of one sequence; each divides `TOTAL_TOKENS`.
        head_size: elements of a head.
        fp8: e4m3 queries over an e4m3 cache instead, paged alone; the device's matmul speed stays that of bfloat16.
        peers_directory: see `jattn.bench.peers.load_peers`.
        jax_columns: measure the JAX call and the JAX peers too.

    Raises:
        Unsupported: torch or JAX has no CUDA device.
    """
    measure.require_cuda("prefill")
    found = peers.load_peers(peers_directory)
    copy = measure.copy_bytes_per_second()
    matmul = measure.matmul_flops()
    rows, notes = [], []
    for length in lengths:
        batches = [_batch(length, head_size, fp8) for _ in range(2)]
        # Half of the square is masked: two products of 2 operations each on it.
        operations = 2.0 * TOTAL_TOKENS * length * _HEADS * head_size
        times: dict[str, float] = {}
        for name, timed in (_fp8_columns(found) if fp8 else _columns(found, jax_columns)).items():
            try:
                times[name] = timed(batches)
            except Exception as error:  # A peer that fails is a note, not the end of the table.
                if name.startswith(OURS):
                    raise
                times[name] = math.nan
                notes.append(f"{name} at {length}: {str(error).splitlines()[0][:160]}")
        rows.append(Row(str(length), operations / matmul * 1e6, times, "TFLOP/s", operations))
        del batches
        gc.collect()
        torch.cuda.empty_cache()
    return BenchReport(
        name=f"prefill, causal, {'e4m3, ' if fp8 else ''}heads of {head_size}, TFLOP/s",
        device=measure.device_name(),
        versions=measure.versions(),
        copy_bytes_per_second=copy,
        matmul_flops=matmul,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table; writes JSON and a picture where asked to. Returns 0."""
    parser = argparse.ArgumentParser(prog="jattn bench prefill", description=__doc__)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a folder with bench_peers.py")
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, default=128, help="elements of a head (128)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--fp8", action="store_true", help="e4m3 queries over an e4m3 cache")
    instead.add_argument("--mixed", action="store_true", help="a batch of prefill chunks and decode rows instead")
    instead.add_argument("--chunks", action="store_true", help="short and long chunks on earlier tokens instead")
    parser.add_argument("--no-jax", action="store_true", help="leave the JAX columns out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.mixed:
        report = mixed.run(peers_directory=options.peers)
    elif options.chunks:
        report = chunks.run(peers_directory=options.peers)
    else:
        report = run(
            head_size=options.head_size,
            fp8=options.fp8,
            peers_directory=options.peers,
            jax_columns=not options.no_jax,
        )
    print(report.table())
    for peer in () if options.mixed or options.chunks else report.columns:
        ours = f"{OURS} paged" if "paged" in peer or "block" in peer else f"{OURS} dense"
        if not peer.startswith(OURS):
            print(f"{peer} takes {report.ratio(peer, ours):.2f} x the time of {ours} (geometric mean)")
    report.write(json_path=options.json, png_path=options.png)
    return 0


def _batch(length: int, size: int, fp8: bool) -> _Batch:
    num_seqs = TOTAL_TOKENS // length
    query = torch.randn(TOTAL_TOKENS, _HEADS, size, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, TOTAL_TOKENS, _KV_HEADS, size, device="cuda", dtype=torch.bfloat16)
    blocks = TOTAL_TOKENS // _BLOCK
    table = torch.randperm(blocks, device="cuda")
    cache = torch.empty(blocks, 2, _BLOCK, _KV_HEADS, size, device="cuda", dtype=torch.bfloat16)
    cache[table, 0] = key.unflatten(0, (blocks, _BLOCK))
    cache[table, 1] = value.unflatten(0, (blocks, _BLOCK))
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    return _Batch(
        query=query.to(element),
        key=key,
        value=value,
        out=torch.empty_like(query),
        kv_cache=cache.to(element),
        block_tables=table.to(torch.int32).reshape(num_seqs, -1),
        seq_lens=torch.full((num_seqs,), length, device="cuda", dtype=torch.int32),
        starts=torch.arange(0, TOTAL_TOKENS + 1, length, device="cuda", dtype=torch.int32),
        length=length,
    )


def _columns(found: Any, jax_columns: bool) -> dict[str, Callable[[list[_Batch]], float]]:
    calls: dict[str, Callable[[_Batch], Callable[[], Any]]] = {
        f"{OURS} dense": _dense,
        f"{OURS} paged": _paged,
        "cuDNN SDPA dense": _sdpa("cudnn"),
        "FA2 SDPA dense": _sdpa("flash"),
    }
    if found is not None:
        calls["FA3 dense"] = lambda batch: _fa3_dense(found, batch)
        calls["FA3 block 16"] = lambda batch: _fa3_paged(found, batch)
        calls["vLLM dense"] = lambda batch: _vllm_dense(found, batch)
        calls["vLLM paged"] = lambda batch: _vllm_paged(found, batch)
    columns: dict[str, Callable[[list[_Batch]], float]] = {name: _timed(call) for name, call in calls.items()}
    if jax_columns:
        columns[f"{OURS} dense in JAX"] = _dense_in_jax
        columns["cuDNN in JAX dense"] = _cudnn_in_jax
    return columns


def _fp8_columns(found: Any) -> dict[str, Callable[[list[_Batch]], float]]:
    columns = {f"{OURS} paged": _timed(_paged)}
    if found is not None:
        columns["FA3 block 16"] = _timed(lambda batch: _fa3_paged(found, batch))
    return columns


def _timed(call: Callable[[_Batch], Callable[[], Any]]) -> Callable[[list[_Batch]], float]:
    return lambda batches: measure.graph_us([call(batch) for batch in batches])


def _dense(batch: _Batch) -> Callable[[], Any]:
    return lambda: ops.attention(
        batch.query,
        batch.key,
        batch.value,
        batch.starts,
        batch.starts,
        spec=batch.spec,
        max_query_len=batch.length,
        max_key_len=batch.length,
        out=batch.out,
    )


def _paged(batch: _Batch) -> Callable[[], Any]:
    return lambda: ops.paged_attention(
        batch.query,
        batch.kv_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.starts,
        spec=batch.spec,
        max_query_len=batch.length,
        out=batch.out,
    )


def _sdpa(backend: str) -> Callable[[_Batch], Callable[[], Any]]:
    def call(batch: _Batch) -> Callable[[], Any]:
        attend = peers.sdpa(backend)
        rows = [x.unflatten(0, (-1, batch.length)).transpose(1, 2) for x in (batch.query, batch.key, batch.value)]
        return lambda: attend(*rows, causal=True)

    return call


def _fa3_dense(found: Any, batch: _Batch) -> Callable[[], Any]:
    bounds = {"cu_q": batch.starts, "cu_k": batch.starts, "max_q": batch.length, "max_k": batch.length}
    return lambda: found.fa3(batch.query, batch.key, batch.value, out=batch.out, **bounds)


def _fa3_paged(found: Any, batch: _Batch) -> Callable[[], Any]:
    key, value = batch.kv_cache.unbind(1)
    bounds = {"cu_q": batch.starts, "max_q": batch.length, "max_k": batch.length, "seq_lens": batch.seq_lens}
    if batch.query.dtype == torch.float8_e4m3fn:
        ones = torch.ones(len(batch.seq_lens), _KV_HEADS, device="cuda")
        bounds |= {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    return lambda: found.fa3(batch.query, key, value, out=batch.out, block_table=batch.block_tables, **bounds)


def _vllm_dense(found: Any, batch: _Batch) -> Callable[[], Any]:
    return lambda: found.vllm_dense(
        batch.query, batch.key, batch.value, batch.out, batch.starts[:-1], batch.seq_lens, batch.length, True
    )


def _vllm_paged(found: Any, batch: _Batch) -> Callable[[], Any]:
    key, value = batch.kv_cache.unbind(1)
    bounds = {"cu_q": batch.starts, "max_q": batch.length, "max_k": batch.length, "seq_lens": batch.seq_lens}
    return lambda: found.vllm_unified(
        batch.query, key, value, batch.out, block_table=batch.block_tables, split=False, **bounds
    )


def _dense_in_jax(batches: list[_Batch]) -> float:
    from jattn import ops

    def attend(query: Any, key: Any, value: Any, starts: Any, length: int) -> Any:
        return ops.attention(query, key, value, starts, max_query_len=length, implementation="triton")

    return _chained(batches, attend)


def _cudnn_in_jax(batches: list[_Batch]) -> float:
    import jax

    def attend(query: Any, key: Any, value: Any, starts: Any, length: int) -> Any:
        rows = [x.reshape(-1, length, *x.shape[1:]) for x in (query, key, value)]
        return jax.nn.dot_product_attention(*rows, is_causal=True, implementation="cudnn").reshape(query.shape)

    return _chained(batches, attend)


def _chained(batches: list[_Batch], attend: Callable[[Any, Any, Any, Any, int], Any]) -> float:
    import jax

    from jattn.bridge import to_jax

    repeats = 4
    arrays = [tuple(to_jax(x) for x in (batch.key, batch.value, batch.starts)) for batch in batches]

    def program(query: Any, arrays: Any) -> Any:
        for _ in range(repeats):
            for key, value, starts in arrays:
                query = attend(query, key, value, starts, batches[0].length)
        return query

    arguments = (to_jax(batches[0].query), arrays)
    return measure.jax_us(jax.jit(program), arguments, calls=repeats * len(batches), rounds=5)
