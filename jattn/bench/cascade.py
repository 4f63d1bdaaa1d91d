"""A layer's decode step over a prefix that all sequences share: plain, by cascade, and the builder's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from jattn.bench.batch import BLOCK_SIZE, HEADS, KV_HEADS, Batch, random_batch
from jattn.bench.pictures import draw_fractions
from jattn.bench.report import OURS, BenchReport, Row
from jattn.bench.runner import Benchmark
from jattn.bench.session import Session, in_graph
from torch_core.metadata import prefix_piece_tokens, use_cascade_attention
from torch_core.vllm import AttentionScales, PagedAttentionMetadata, TritonAttentionImpl

SEQUENCES = (2, 4, 8, 16, 64, 256)
#: Tokens that all sequences share.
PREFIXES = (256, 512, 1024, 2048, 8192)
_SIZE, _OWN = 128, 64
_PLAIN, _CASCADE = f"{OURS} plain", f"{OURS} cascade"


def run(*, sequences: Sequence[int] = SEQUENCES, prefixes: Sequence[int] = PREFIXES) -> BenchReport:
    """Measures by graph replay: 32 query heads, 8 key/value heads of 128, bfloat16, 64 own tokens of each sequence.

    Args:
        sequences: number of sequences in a batch, with one new token each.
        prefixes: tokens that they share, whole blocks.

    Returns:
        A row for each batch, its label with a star if the builder chooses cascade; see `verdicts` for the values.

    Raises:
        Unsupported: torch or JAX has no CUDA device.
    """
    session, chosen = Session("decode"), []
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for prefix in prefixes:
        for seqs in sequences:
            chosen.append(
                use_cascade_attention(
                    prefix,
                    np.ones(seqs),
                    num_query_heads=HEADS,
                    num_kv_heads=KV_HEADS,
                    head_size=_SIZE,
                    bytes_per_element=2,
                    num_sms=num_sms,
                )
            )
            batch = random_batch(((seqs, 1, prefix + _OWN - 1),))
            batch.block_tables[:, : prefix // BLOCK_SIZE] = batch.block_tables[0, : prefix // BLOCK_SIZE]
            read = (prefix + seqs * _OWN) * 2 * KV_HEADS * _SIZE * 2
            row = Row(f"{seqs} x {prefix}{' *' if chosen[-1] else ''}", read / session.copy * 1e6, {})
            columns = {_PLAIN: in_graph(lambda batch: _step(batch, 0))}
            columns[_CASCADE] = in_graph(lambda batch, prefix=prefix: _step(batch, prefix))
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


def _step(batch: Batch, prefix: int) -> Callable[[], Any]:
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


BENCHMARK = Benchmark("cascade", __doc__, run, draw=draw_fractions)
