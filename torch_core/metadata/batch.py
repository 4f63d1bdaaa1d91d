"""The order of a batch: decodes first, and where decodes end and prefills begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.metadata.check import first_true
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.rows import SequenceRowLike

__all__ = [
    "BatchSplit",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
]


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
        raise InvalidInput(
            f"row {index} has a query of {lens[index]} tokens after row {first} with {lens[first]}; decodes (at most "
            f"{decode_threshold}) come first. Order the rows with reorder_batch_to_split_decodes_and_prefills."
        )
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
            raise RequestTooLong(
                f"seq_lens[{index}]",
                value=length,
                wanted=f"the workspace holds {workspace_size} tokens. Split the prompt",
            )
        if filled + length > workspace_size:
            chunks.append((start + request_offset, index + request_offset))
            start, filled = index, 0
        filled += length
    if len(seq_lens) > start:
        chunks.append((start + request_offset, len(seq_lens) + request_offset))
    return chunks


def _boundary(flags: np.ndarray) -> tuple[int, int | None]:
    """Returns where the flags begin to be set (their number, if nowhere), and where one behind that is not."""
    start = first_true(flags)
    if start is None:
        return len(flags), None
    gap = first_true(~flags[start:])
    return start, None if gap is None else start + gap
