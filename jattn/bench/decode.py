"""Decode attention over a paged cache, next to its peers and to the time that reading the cache once takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jattn.bench import cascade, measure, peers
from jattn.bench.batch import KV_HEADS, Batch, cold_batches, fa3, ours, packed, vllm_triton
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, Mode, sizes
from jattn.bench.session import Column, Session, in_graph

#: Sequences and tokens of each, in the rows of the default table.
SHAPES = ("1x1024", "1x8192", "1x65536", "8x8192", "32x4096", "64x2048", "128x1024", "128x4096", "256x512")
_SIZE = 128
_MAX_COPIED_TOKENS = 1 << 18
_OURS_IN_JAX = f"{OURS} in JAX"


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    fp8: bool = False,
    peers: Path | None = None,
    no_jax: bool = False,
) -> BenchReport:
    """Measures every shape: 32 query heads, 8 key/value heads of 128, block size 16, bfloat16 queries.

    Args:
        shapes: "SEQUENCESxTOKENS" of each row.
        fp8: an e4m3 cache instead of bfloat16.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and the JAX peers.
    """
    session = Session("decode", peers)
    cache_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    for num_seqs, tokens in map(sizes, shapes):
        read = num_seqs * tokens * 2 * KV_HEADS * _SIZE * cache_dtype.itemsize
        session.add(
            Row(f"{num_seqs} x {tokens}", read / session.copy * 1e6, {}),
            _columns(session.peers, cache_dtype, not no_jax, num_seqs * tokens),
            cold_batches(((num_seqs, 1, tokens - 1),), cache_dtype=cache_dtype),
            required=(OURS, _OURS_IN_JAX),
        )
    name = f"decode, {'float8_e4m3fn' if fp8 else 'bfloat16'} cache"
    return session.report(name, compared=lambda name: None if name == OURS else OURS)


def _columns(found: Any, cache_dtype: torch.dtype, jax_columns: bool, num_tokens: int) -> dict[str, Column]:
    quantised = cache_dtype.itemsize == 1
    scale = torch.ones(1, device="cuda") if quantised else None
    columns = {OURS: in_graph(lambda batch: ours(batch, scale))}
    if found is not None:
        columns["FA3"] = in_graph(lambda batch: fa3(found, batch))
        columns["vLLM Triton"] = in_graph(lambda batch: vllm_triton(found, batch))
    # Peers that copy the cache, in the call or before it; beyond this size they only show how memory runs out.
    copies = not quantised and num_tokens <= _MAX_COPIED_TOKENS
    if copies:
        columns["cuDNN SDPA dense"] = in_graph(_cudnn)
    if jax_columns:
        columns[_OURS_IN_JAX] = _ours_in_jax
        if copies:
            columns["cuDNN in JAX dense"] = _cudnn_in_jax
            columns["Pallas paged"] = _pallas
            columns["XLA gather"] = _gather
    return columns


def _cudnn(batch: Batch) -> Callable[[], Any]:
    attend = peers.sdpa("cudnn")
    # Dense and contiguous: the input of cuDNN without pages.
    dense = batch.kv_cache[1:].reshape(len(batch.seq_lens), -1, 2, KV_HEADS, _SIZE)[:, : batch.max_key_len]
    key, value = (dense[:, :, index].transpose(1, 2) for index in range(2))
    return lambda: attend(batch.query[:, :, None], key, value, causal=False)


def _ours_in_jax(batches: list[Batch]) -> float:
    from jattn import ops

    def attend(query: Any, *arrays: Any) -> Any:
        return ops.paged_attention(query, *arrays, max_query_len=1, implementation="triton")

    return _chained(attend, batches, [(b.kv_cache, b.block_tables, b.seq_lens, b.starts) for b in batches])


def _gather(batches: list[Batch]) -> float:
    return _chained(peers.xla_gather, batches, [(b.kv_cache, b.block_tables) for b in batches])


def _pallas(batches: list[Batch]) -> float:
    attend = peers.pallas_paged()
    # Its own layout, made beforehand: [num_kv_heads, num_blocks, block_size, head_size], keys and values apart.
    arrays = [
        (*(x.permute(2, 0, 1, 3).contiguous() for x in b.kv_cache.unbind(1)), b.block_tables, b.seq_lens)
        for b in batches
    ]
    return _chained(attend, batches, arrays)


def _cudnn_in_jax(batches: list[Batch]) -> float:
    import jax

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query[:, None], key, value, implementation="cudnn")[:, 0]

    shape = (-1, batches[0].max_key_len, KV_HEADS, _SIZE)
    return _chained(attend, batches, [tuple(x.reshape(shape) for x in packed(b)) for b in batches])


def _chained(attend: Callable[..., Any], batches: list[Batch], tensors: list[tuple[torch.Tensor, ...]]) -> float:
    return measure.chained_us(attend, batches[0].query, tensors, rotations=max(1, 16 // len(batches)))


BENCHMARK = Benchmark(
    "decode",
    __doc__,
    run,
    modes=(Mode("--cascade", cascade.BENCHMARK, "--cascade measures a bfloat16 cache and no peers"),),
    draw=draw_fractions,
)
