"""Chunked local attention as plain causal attention over virtual sequences, one per chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.metadata.common import CommonAttentionMetadata

__all__ = ["make_local_attention_virtual_batches"]


def make_local_attention_virtual_batches(
    attn_chunk_size: int, metadata: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Callable[[Any], Any]]:
    """Returns a batch in which each chunk that a sequence's query touches is a sequence of its own.

    In chunked local attention a query sees the keys of its own chunk of `attn_chunk_size` positions only (Llama 4).
    Cutting each sequence at the chunk boundaries turns the mask into the plain causal one. Our kernels mask chunks
    themselves (`AttentionSpec.attention_chunk`); this form is for kernels that do not, and a check on those that do.
    The idea is vLLM's (`vllm/v1/attention/backends/utils.py`, same name).

    Args:
        attn_chunk_size: positions of a chunk, a multiple of the block size.
        metadata: the batch; padding rows are dropped. Slots and positions stay those of the real sequences.

    Returns:
        The virtual batch, and a function that makes its block tables from another numpy or torch table of the same
        rows, for `update_block_table`.

    Raises:
        InvalidInput: the chunk size is not a positive multiple of the block size.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> step = build_common_metadata([SequenceRow([5, 6, 7], 2, 4)], block_size=2, num_blocks=8)
        >>> local, _ = make_local_attention_virtual_batches(4, step)
        >>> local.query_start_loc.tolist(), local.seq_lens.tolist(), local.block_tables.tolist()
        ([0, 2, 4], [4, 2], [[5, 6], [7, 0]])
    """
    block_size = metadata.block_size
    if attn_chunk_size < 1 or attn_chunk_size % block_size:
        raise InvalidInput(
            f"attn_chunk_size is {attn_chunk_size}; it must be a positive multiple of the block size, {block_size}."
        )
    reqs = metadata.num_reqs
    ends = metadata.seq_lens[:reqs].astype(np.int64)
    begins = ends - metadata.query_lens[:reqs]
    first_chunk = begins // attn_chunk_size
    num_chunks = (ends - 1) // attn_chunk_size - first_chunk + 1
    row = np.repeat(np.arange(reqs), num_chunks)
    chunk = first_chunk[row] + np.arange(row.size) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)

    start = chunk * attn_chunk_size
    stop = np.minimum(start + attn_chunk_size, ends[row])
    query_lens = stop - np.maximum(start, begins[row])
    seq_lens = (stop - start).astype(np.int32)
    column = start[:, None] // block_size + np.arange(attn_chunk_size // block_size)
    column = np.minimum(column, metadata.block_tables.shape[1] - 1)

    def make_block_tables(block_tables: Any) -> Any:
        return block_tables[row[:, None], column]

    used = np.arange(column.shape[1]) < -(-seq_lens // block_size)[:, None]
    virtual = replace(
        metadata,
        query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=make_block_tables(metadata.block_tables) * used,
        num_reqs=row.size,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        causal=True,
        encoder=None,
        packed=None,
        layout=None,
    )
    return virtual, make_block_tables
