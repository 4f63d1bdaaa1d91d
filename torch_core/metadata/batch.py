"""The order of a batch, its division into decodes and prefills, and batches made from another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata.check import first_true
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.rows import SequenceRowLike


class BatchSplit(NamedTuple):
    """The division of a batch into decodes and prefills: rows and tokens of each part."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def reorder_batch_to_split_decodes_and_prefills(
    rows: Sequence[SequenceRowLike], decode_threshold: int = 1
) -> np.ndarray:
    """Returns the order in which rows should be passed on: decodes, then extends, then prefills; stable within each.

    A decode has a context and at most `decode_threshold` new tokens; an extend has a context and more; a prefill has
    no context. vLLM swaps the rows of its persistent batch in place (`vllm/v1/attention/backends/utils.py`); the rows
    here are values, so the order is returned.

    Returns:
        int[rows]: `order[i]` is the row that comes i-th.

    Example:
        >>> from torch_core.metadata import SequenceRow
        >>> rows = [SequenceRow([1], 0, 3), SequenceRow([2], 3, 1), SequenceRow([4], 1, 2)]
        >>> reorder_batch_to_split_decodes_and_prefills(rows).tolist()
        [1, 2, 0]
    """
    check_int("decode_threshold", decode_threshold, 1)
    computed = np.array([row.num_computed_tokens for row in rows], np.int64)
    new = np.array([row.num_new_tokens for row in rows], np.int64)
    region = np.where(computed == 0, 2, np.where(new > decode_threshold, 1, 0))
    return np.argsort(region, kind="stable")


def split_decodes_and_prefills(
    metadata: CommonAttentionMetadata, decode_threshold: int = 1, *, require_uniform: bool = False
) -> BatchSplit:
    """Returns where the decodes of an ordered batch end; padding rows count for neither part.

    Args:
        metadata: a batch whose decodes come first.
        decode_threshold: longest query of a decode, at least 1.
        require_uniform: decodes must also have one and the same query length, that of the first row; the first row
            that differs begins the prefills. Kernels that reshape the queries to `[rows, length]` need that.

    Raises:
        InvalidInput: a decode comes after a prefill.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> rows = [SequenceRow([1], 2, 1), SequenceRow([2], 3, 1), SequenceRow([3], 0, 4)]
        >>> split_decodes_and_prefills(build_common_metadata(rows, block_size=4, num_blocks=8))
        BatchSplit(num_decodes=2, num_prefills=1, num_decode_tokens=2, num_prefill_tokens=4)
    """
    check_int("decode_threshold", decode_threshold, 1)
    lens = metadata.query_lens[: metadata.num_reqs]
    is_prefill = lens > decode_threshold
    first, index = _boundary(is_prefill)
    if index is not None:
        wanted = (
            f"decodes (at most {decode_threshold}) come first. Order the rows with "
            "reorder_batch_to_split_decodes_and_prefills"
        )
        raise InvalidInput(f"query_lens[{index}]", f"is {lens[index]} after {lens[first]} of row {first}", wanted)
    if require_uniform and first:
        first, _ = _boundary(lens[:first] != lens[0])
    tokens = int(metadata.query_start_loc[first])
    return BatchSplit(first, metadata.num_reqs - first, tokens, metadata.num_actual_tokens - tokens)


def split_prefill_chunks(seq_lens: np.ndarray, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Returns runs of rows whose lengths sum to at most `workspace_size`: (first row, row after the last).

    `request_offset` is added to the row numbers.

    Raises:
        RequestTooLong: one sequence alone does not fit.

    Example:
        >>> split_prefill_chunks(np.array([3, 4, 5]), 8)
        [(0, 2), (2, 3)]
    """
    chunks = []
    start = filled = 0
    for index, length in enumerate(seq_lens.tolist()):
        if length > workspace_size:
            wanted = f"the workspace holds {workspace_size} tokens. Split the prompt"
            raise RequestTooLong(f"seq_lens[{index}]", value=length, wanted=wanted)
        if filled + length > workspace_size:
            chunks.append((start + request_offset, index + request_offset))
            start, filled = index, 0
        filled += length
    if len(seq_lens) > start:
        chunks.append((start + request_offset, len(seq_lens) + request_offset))
    return chunks


def make_kv_sharing_fast_prefill_common_attn_metadata(
    metadata: CommonAttentionMetadata, logits_indices: np.ndarray
) -> CommonAttentionMetadata:
    """Returns the batch of the chosen query tokens alone, over the same sequences.

    Layers after the last one that writes keys and values of its own (`kv_sharing_target_layer_name`) feed nothing
    but the logits, so a prompt's other tokens can be left out of them (YOCO, Gemma 3n). The mask is aligned
    bottom-right, so the chosen tokens of a sequence must be its last ones.

    Args:
        metadata: the batch.
        logits_indices: int[n], rising token numbers of the batch; at least one for each sequence.

    Raises:
        InvalidInput: the indices are out of range, not rising, or not the last tokens of every sequence.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> step = build_common_metadata([SequenceRow([5], 0, 3), SequenceRow([6], 2, 1)], block_size=4, num_blocks=8)
        >>> make_kv_sharing_fast_prefill_common_attn_metadata(step, np.array([2, 3])).query_start_loc.tolist()
        [0, 1, 2]
    """
    reqs, tokens = metadata.num_reqs, metadata.num_actual_tokens
    indices = np.asarray(logits_indices)
    if indices.size and (indices[0] < 0 or indices[-1] >= tokens or (np.diff(indices) <= 0).any()):
        wanted = f"they begin with {indices[:4].tolist()} and end with {indices[-1]}"
        raise InvalidInput("logits_indices", f"must rise strictly within 0..{tokens - 1}", wanted)
    ends = metadata.query_start_loc[1 : reqs + 1]
    row = np.searchsorted(ends, indices, side="right")
    counts = np.bincount(row, minlength=reqs)
    last = ends[row] - indices <= counts[row]
    if (counts == 0).any() or not last.all():
        index = int(np.argmin(counts)) if (counts == 0).any() else int(row[np.argmin(last)])
        problem = f"do not choose the last tokens of row {index} ({counts[index]} chosen)"
        wanted = "every sequence needs at least its last token, and no gaps"
        raise InvalidInput("logits_indices", problem, wanted)
    return replace(
        metadata,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=metadata.seq_lens[:reqs],
        block_tables=metadata.block_tables[:reqs],
        slot_mapping=metadata.slot_mapping[indices],
        positions=metadata.positions[indices],
        num_actual_tokens=int(indices.size),
        max_query_len=int(counts.max(initial=0)),
        state_slots=None,
        packed=None,
        layout=None,
    )


def make_local_attention_virtual_batches(
    attn_chunk_size: int, metadata: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Callable[[Any], Any]]:
    """Returns a batch in which each chunk that a sequence's query touches is a sequence of its own.

    In chunked local attention a query sees the keys of its own chunk of `attn_chunk_size` positions only (Llama 4).
    Cutting each sequence at the chunk boundaries converts the mask into the plain causal one. Our kernels mask chunks
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
        wanted = f"it must be a positive multiple of the block size, {block_size}"
        raise InvalidInput("attn_chunk_size", value=attn_chunk_size, wanted=wanted)
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
        state_slots=None,
        packed=None,
        layout=None,
    )
    return virtual, make_block_tables


def _boundary(flags: np.ndarray) -> tuple[int, int | None]:
    """Returns where the flags begin to be set (their number, if nowhere), and where they end; None for at the end."""
    start = first_true(flags)
    if start is None:
        return len(flags), None
    return start, first_true(~flags, start)
