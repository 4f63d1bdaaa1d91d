"""Decode attention over a paged cache, next to its peers and to the time that reading the cache once takes."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jattn.bench import measure, peers
from jattn.bench.report import OURS, BenchReport, Row
from torch_core import ops
from torch_core.specs import AttentionSpec

__all__ = ["SHAPES", "main", "run"]

#: (sequences, tokens of each) of the default table.
SHAPES = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (32, 4096), (64, 2048), (128, 1024), (128, 4096), (256, 512))
_HEADS, _KV_HEADS, _SIZE, _BLOCK = 32, 8, 128, 16
_MAX_COPIED_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class _Pool:
    # One rotation's memory: its own cache, with blocks that no two sequences share, in random order.
    query: torch.Tensor
    out: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


def run(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    kv_cache_dtype: str = "bfloat16",
    peers_directory: Path | None = None,
    jax_columns: bool = True,
) -> BenchReport:
    """Measures every shape: 32 query heads, 8 key/value heads of 128, block size 16, bfloat16 queries.

    Args:
        shapes: (sequences, tokens of each).
        kv_cache_dtype: "bfloat16" or "float8_e4m3fn".
        peers_directory: see `jattn.bench.peers.load_peers`.
        jax_columns: measure the JAX call and the JAX peers too.

    Raises:
        Unsupported: torch or JAX has no CUDA device.
    """
    measure.require_cuda("decode")
    found = peers.load_peers(peers_directory)
    copy = measure.copy_bytes_per_second()
    matmul = measure.matmul_flops()
    rows, notes = [], []
    for num_seqs, tokens in shapes:
        pools = _pools(num_seqs, tokens, kv_cache_dtype)
        read = num_seqs * tokens * 2 * _KV_HEADS * _SIZE * pools[0].kv_cache.element_size()
        times: dict[str, float] = {}
        for name, timed in _columns(found, kv_cache_dtype, jax_columns, num_seqs * tokens).items():
            try:
                times[name] = timed(pools, tokens)
            except Exception as error:  # A peer that fails is a note, not the end of the table.
                if name.startswith(OURS):
                    raise
                times[name] = math.nan
                notes.append(f"{name} at {num_seqs} x {tokens}: {str(error).splitlines()[0][:160]}")
        rows.append(Row(f"{num_seqs} x {tokens}", read / copy * 1e6, times))
        del pools
        gc.collect()
        torch.cuda.empty_cache()
    return BenchReport(
        name=f"decode, {kv_cache_dtype} cache",
        device=measure.device_name(),
        versions=measure.versions(),
        copy_bytes_per_second=copy,
        matmul_flops=matmul,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table; writes JSON and a picture where asked to. Returns 0."""
    parser = argparse.ArgumentParser(prog="jattn bench decode", description=__doc__)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a folder with bench_peers.py")
    parser.add_argument("--fp8", action="store_true", help="an e4m3 cache")
    parser.add_argument("--no-jax", action="store_true", help="leave the JAX columns out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    report = run(
        kv_cache_dtype="float8_e4m3fn" if options.fp8 else "bfloat16",
        peers_directory=options.peers,
        jax_columns=not options.no_jax,
    )
    print(report.table())
    for peer in report.columns[1:]:
        print(f"{peer} takes {report.ratio(peer):.2f} x the time of {OURS} (geometric mean)")
    report.write(json_path=options.json, png_path=options.png)
    return 0


def _pools(num_seqs: int, tokens: int, dtype: str) -> list[_Pool]:
    blocks = num_seqs * tokens // _BLOCK
    element = torch.bfloat16 if dtype == "bfloat16" else torch.float8_e4m3fn
    pool_bytes = blocks * 2 * _BLOCK * _KV_HEADS * _SIZE * element.itemsize
    pools = []
    for _ in range(measure.num_pools(pool_bytes)):
        cache = torch.randn(blocks, 2, _BLOCK, _KV_HEADS, _SIZE, device="cuda", dtype=torch.bfloat16).to(element)
        query = torch.randn(num_seqs, _HEADS, _SIZE, device="cuda", dtype=torch.bfloat16)
        pools.append(
            _Pool(
                query=query,
                out=torch.empty_like(query),
                kv_cache=cache,
                block_tables=torch.randperm(blocks, device="cuda").to(torch.int32).reshape(num_seqs, -1),
                seq_lens=torch.full((num_seqs,), tokens, device="cuda", dtype=torch.int32),
                query_start_loc=torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32),
            )
        )
    return pools


def _columns(found: Any, dtype: str, jax_columns: bool, size: int) -> dict[str, Callable[[list[_Pool], int], float]]:
    columns: dict[str, Callable[[list[_Pool], int], float]] = {OURS: _ours}
    if found is not None:
        columns["FA3"] = lambda pools, tokens: _fa3(found, pools, tokens)
        columns["vLLM Triton"] = lambda pools, tokens: _vllm(found, pools, tokens)
    if dtype == "bfloat16" and size <= _MAX_COPIED_TOKENS:
        columns["cuDNN SDPA dense"] = _cudnn
    if jax_columns:
        columns["jattn in JAX"] = _ours_in_jax
        # These copy the cache, in the call or before it; beyond this size they only show how memory runs out.
        if dtype == "bfloat16" and size <= _MAX_COPIED_TOKENS:
            columns["cuDNN in JAX dense"] = _cudnn_in_jax
            columns["Pallas paged"] = _pallas
            columns["XLA gather"] = _gather
    return columns


def _ours(pools: list[_Pool], tokens: int) -> float:
    spec = AttentionSpec(scale=_SIZE**-0.5)
    scale = None if pools[0].kv_cache.dtype == torch.bfloat16 else torch.ones(1, device="cuda")

    def call(pool: _Pool) -> Callable[[], Any]:
        return lambda: ops.paged_attention(
            pool.query,
            pool.kv_cache,
            pool.block_tables,
            pool.seq_lens,
            pool.query_start_loc,
            spec=spec,
            max_query_len=1,
            out=pool.out,
            k_scale=scale,
            v_scale=scale,
        )

    return measure.graph_us([call(pool) for pool in pools])


def _fa3(found: Any, pools: list[_Pool], tokens: int) -> float:
    fp8 = pools[0].kv_cache.dtype != torch.bfloat16
    ones = torch.ones(len(pools[0].seq_lens), _KV_HEADS, device="cuda")
    # FlashAttention-3 multiplies fp8 by fp8: its query is e4m3 when its cache is.
    extra = {"q_descale": ones, "k_descale": ones, "v_descale": ones} if fp8 else {}

    def call(pool: _Pool) -> Callable[[], Any]:
        key, value = pool.kv_cache.unbind(1)
        query = pool.query.to(torch.float8_e4m3fn) if fp8 else pool.query
        return lambda: found.fa3(
            query,
            key,
            value,
            cu_q=pool.query_start_loc,
            max_q=1,
            max_k=tokens,
            seq_lens=pool.seq_lens,
            block_table=pool.block_tables,
            out=pool.out,
            **extra,
        )

    return measure.graph_us([call(pool) for pool in pools])


def _vllm(found: Any, pools: list[_Pool], tokens: int) -> float:
    def call(pool: _Pool) -> Callable[[], Any]:
        key, value = pool.kv_cache.unbind(1)
        return lambda: found.vllm_unified(
            pool.query,
            key,
            value,
            pool.out,
            cu_q=pool.query_start_loc,
            max_q=1,
            max_k=tokens,
            seq_lens=pool.seq_lens,
            block_table=pool.block_tables,
        )

    return measure.graph_us([call(pool) for pool in pools])


def _cudnn(pools: list[_Pool], tokens: int) -> float:
    attend = peers.sdpa("cudnn")

    def call(pool: _Pool) -> Callable[[], Any]:
        num_seqs = len(pool.seq_lens)
        # Dense and contiguous: what cuDNN would read if there were no pages.
        dense = pool.kv_cache.reshape(num_seqs, -1, 2, _KV_HEADS, _SIZE)[:, :tokens]
        key, value = (dense[:, :, index].transpose(1, 2) for index in range(2))
        return lambda: attend(pool.query[:, :, None], key, value, causal=False)

    return measure.graph_us([call(pool) for pool in pools])


def _ours_in_jax(pools: list[_Pool], tokens: int) -> float:
    from jattn import ops

    def attend(query: Any, *arrays: Any) -> Any:
        return ops.paged_attention(query, *arrays, max_query_len=1, implementation="triton")

    return _chained(attend, [(p.kv_cache, p.block_tables, p.seq_lens, p.query_start_loc) for p in pools], pools)


def _gather(pools: list[_Pool], tokens: int) -> float:
    return _chained(peers.xla_gather, [(p.kv_cache, p.block_tables) for p in pools], pools)


def _pallas(pools: list[_Pool], tokens: int) -> float:
    attend = peers.pallas_paged()
    # Its own layout, made beforehand: [num_kv_heads, num_blocks, block_size, head_size], keys and values apart.
    arrays = [
        (*(x.permute(2, 0, 1, 3).contiguous() for x in p.kv_cache.unbind(1)), p.block_tables, p.seq_lens) for p in pools
    ]
    return _chained(attend, arrays, pools)


def _cudnn_in_jax(pools: list[_Pool], tokens: int) -> float:
    import jax

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query[:, None], key, value, implementation="cudnn")[:, 0]

    shape = (-1, tokens, _KV_HEADS, _SIZE)
    arrays = [tuple(x.contiguous().reshape(shape) for x in p.kv_cache.unbind(1)) for p in pools]
    return _chained(attend, arrays, pools)


def _chained(attend: Callable[..., Any], tensors: Sequence[tuple[torch.Tensor, ...]], pools: list[_Pool]) -> float:
    # Each call's query is the result of the one before, so that nothing runs side by side.
    import jax

    from jattn.bridge import to_jax

    repeats = max(1, 16 // len(pools))

    def program(query: Any, arrays: Any) -> Any:
        for _ in range(repeats):
            for array in arrays:
                query = attend(query, *array)
        return query

    arrays = [tuple(to_jax(tensor) for tensor in group) for group in tensors]
    return measure.jax_us(jax.jit(program), (to_jax(pools[0].query), arrays), calls=repeats * len(pools))
