"""Decode attention over a paged cache, next to its peers and to the time that reading the cache once takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import torch

from jattn import ops
from jattn.bench import measure, peers
from jattn.bench.batch import (
    BLOCK_SIZE,
    HEADS,
    KV_HEADS,
    Batch,
    cold_batches,
    fa3,
    fa4,
    ours,
    packed,
    random_batch,
    vllm_triton,
)
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark, Mode, sizes
from jattn.bench.session import Column, Session, in_graph, with_ours
from torch_core.metadata import prefix_piece_tokens, use_cascade_attention
from torch_core.vllm import AttentionScales, PagedAttentionMetadata, TritonAttentionImpl

#: Sequences and tokens of each, in the rows of the default table; the last batches are uneven.
SHAPES = (
    *("1x1024", "1x8192", "1x65536", "8x8192", "32x4096", "64x2048", "128x1024", "128x4096", "256x512"),
    *("1x8192+7x300", "1x8192+15x300", "4x500+4x1000+4x2000+4x4000"),
)
SEQUENCES = (2, 4, 8, 16, 64, 256)
#: Tokens that all sequences share.
PREFIXES = (256, 512, 1024, 2048, 8192)
_SIZE = 128
# Peers that copy a cache of sequences of one length, in the call or before it, only show beyond this size how memory
# runs out.
_MAX_COPIED_TOKENS = 1 << 18
_OURS_IN_JAX = f"{OURS} in JAX"
_PLAIN, _CASCADE = f"{OURS} plain", f"{OURS} cascade"
# Tokens that a sequence has for itself after a shared prefix.
_OWN = 64


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    head_size: Literal[64, 128, 256, 512] = 128,
    fp8: bool = False,
    peers: Path | None = None,
    no_jax: bool = False,
) -> BenchReport:
    """Measures every shape: 32 query heads, 8 key/value heads, block size 16, bfloat16 queries.

    Args:
        shapes: "SEQUENCESxTOKENS" of each row; with a + between for batches of several lengths.
        head_size: elements of a head.
        fp8: an e4m3 cache instead of bfloat16.
        peers: a folder with bench_peers.py; see `jattn.bench.peers.load_peers`.
        no_jax: leave out the JAX call and the JAX peers.
    """
    session = Session("decode", peers)
    cache_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    for shape in shapes:
        parts = [sizes(part) for part in shape.split("+")]
        num_tokens = sum(map(math.prod, parts))
        read = num_tokens * 2 * KV_HEADS * head_size * cache_dtype.itemsize
        copies = not fp8 and len(parts) == 1 and num_tokens <= _MAX_COPIED_TOKENS
        session.add(
            Row(" + ".join(f"{seqs} x {tokens}" for seqs, tokens in parts), read / session.copy * 1e6, {}),
            _columns(session.peers, fp8, not no_jax, copies),
            cold_batches(
                tuple((seqs, 1, tokens - 1) for seqs, tokens in parts), head_size=head_size, cache_dtype=cache_dtype
            ),
            required=(OURS, _OURS_IN_JAX),
        )
    name = f"decode, {'float8_e4m3fn' if fp8 else 'bfloat16'} cache, heads of {head_size}"
    return session.report(name, compared=with_ours)


def _columns(found: Any, fp8: bool, jax_columns: bool, copies: bool) -> dict[str, Column]:
    scale = torch.ones(1, device="cuda") if fp8 else None
    columns = {OURS: in_graph(lambda batch: ours(batch, scale))}
    if found is not None:
        columns["FA3"] = in_graph(lambda batch: fa3(found, batch))
        columns["vLLM Triton"] = in_graph(lambda batch: vllm_triton(found, batch))
        if not fp8 and (flash4 := peers.load_fa4()) is not None:
            columns["FA4"] = in_graph(lambda batch: fa4(flash4, batch))
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
    # Dense and contiguous: the input of cuDNN without pages.
    size = batch.query.shape[-1]
    dense = batch.kv_cache[1:].reshape(len(batch.seq_lens), -1, 2, KV_HEADS, size)[:, : batch.max_key_len]
    key, value = (dense[:, :, index].transpose(1, 2) for index in range(2))
    return lambda: peers.sdpa("cudnn", batch.query[:, :, None], key, value, causal=False)


def _ours_in_jax(batches: list[Batch]) -> float:
    def attend(query: Any, *arrays: Any) -> Any:
        return ops.paged_attention(query, *arrays, max_query_len=1, implementation="triton")

    return _chained(attend, batches, [(b.kv_cache, b.block_tables, b.seq_lens, b.starts) for b in batches])


def _gather(batches: list[Batch]) -> float:
    return _chained(peers.xla_gather, batches, [(b.kv_cache, b.block_tables) for b in batches])


def _pallas(batches: list[Batch]) -> float:
    # Its own layout, made beforehand: [num_kv_heads, num_blocks, block_size, head_size], keys and values apart.
    arrays = [
        (*(x.permute(2, 0, 1, 3).contiguous() for x in b.kv_cache.unbind(1)), b.block_tables, b.seq_lens)
        for b in batches
    ]
    return _chained(peers.pallas_paged(), batches, arrays)


def _cudnn_in_jax(batches: list[Batch]) -> float:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query[:, None], key, value, implementation="cudnn")[:, 0]

    shape = (-1, batches[0].max_key_len, KV_HEADS, batches[0].query.shape[-1])
    return _chained(attend, batches, [tuple(x.reshape(shape) for x in packed(b)) for b in batches])


def _chained(attend: Callable[..., Any], batches: list[Batch], tensors: list[tuple[torch.Tensor, ...]]) -> float:
    return measure.chained_us(attend, batches[0].query, tensors, rotations=max(1, 16 // len(batches)))


def run_cascade(*, sequences: Sequence[int] = SEQUENCES, prefixes: Sequence[int] = PREFIXES) -> BenchReport:
    """Measures by graph replay: 32 query heads, 8 key/value heads of 128, bfloat16, 64 own tokens of each sequence.

    Args:
        sequences: number of sequences in a batch, with one new token each.
        prefixes: tokens that they share, whole blocks.

    Returns:
        A row for each batch, its label with a star if the builder chooses cascade; see `verdicts` for the values.
    """
    session, chosen = Session("decode"), []
    heads: dict[str, Any] = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": _SIZE}
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for prefix in prefixes:
        for seqs in sequences:
            chosen.append(use_cascade_attention(prefix, np.ones(seqs), **heads, bytes_per_element=2, num_sms=num_sms))
            batch = random_batch(((seqs, 1, prefix + _OWN - 1),))
            batch.block_tables[:, : prefix // BLOCK_SIZE] = batch.block_tables[0, : prefix // BLOCK_SIZE]
            read = (prefix + seqs * _OWN) * 2 * KV_HEADS * _SIZE * 2
            row = Row(f"{seqs} x {prefix}{' *' if chosen[-1] else ''}", read / session.copy * 1e6, {})
            columns = {_PLAIN: in_graph(lambda batch: cascade_step(batch, 0))}
            columns[_CASCADE] = in_graph(lambda batch, prefix=prefix: cascade_step(batch, prefix))
            session.add(row, columns, [batch], required=columns)
    return session.report("shared prefix, us; * where cascade is chosen", values=verdicts(session.rows, chosen))


def verdicts(rows: Sequence[Row], chosen: Sequence[bool]) -> dict[str, float]:
    """Returns in how many rows cascade was chosen and lost, and left out where it won a fifth or more."""
    gains = [row.us[_PLAIN] / row.us[_CASCADE] for row in rows]
    pairs = list(zip(gains, chosen, strict=True))
    return {
        "cascade chosen where it lost": sum(taken and gain < 1 for gain, taken in pairs),
        "left out where it won a fifth": sum(not taken and gain >= 1.25 for gain, taken in pairs),
    }


def cascade_step(batch: Batch, prefix: int) -> Callable[[], Any]:
    """Returns a layer's decode step, by cascade over the first `prefix` tokens or plain with 0."""
    seqs, position = len(batch.seq_lens), batch.max_key_len - 1
    metadata = PagedAttentionMetadata(
        num_actual_tokens=seqs,
        max_query_len=1,
        query_start_loc=batch.starts,
        max_seq_len=batch.max_key_len,
        seq_lens=batch.seq_lens,
        block_table=batch.block_tables,
        slot_mapping=batch.block_tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )
    if prefix:
        piece = prefix_piece_tokens(seqs, num_query_heads=HEADS, num_kv_heads=KV_HEADS)
        metadata = metadata.with_shared_prefix(prefix, piece)
    impl = TritonAttentionImpl(HEADS, _SIZE, _SIZE**-0.5, KV_HEADS)
    scales, new = AttentionScales.of(device=batch.query.device), batch.query[:, :KV_HEADS].contiguous()
    return lambda: impl.forward(scales, batch.query, new, new, batch.kv_cache, metadata, batch.out)


CASCADE = Benchmark(
    "cascade",
    "A layer's decode step over a prefix that all sequences share: plain, by cascade, and the builder's choice.",
    run_cascade,
    draw=draw_fractions,
)
BENCHMARK = Benchmark(
    "decode",
    __doc__,
    run,
    modes=(Mode("--cascade", CASCADE, "--cascade measures a bfloat16 cache and no peers"),),
    draw=draw_fractions,
)
