"""Layers that share another layer's cache need only the queries whose logits are wanted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torch_core.errors import InvalidInput
from torch_core.metadata.common import CommonAttentionMetadata

__all__ = ["make_kv_sharing_fast_prefill_common_attn_metadata"]


def make_kv_sharing_fast_prefill_common_attn_metadata(
    metadata: CommonAttentionMetadata, logits_indices: np.ndarray
) -> CommonAttentionMetadata:
    """Returns the batch of the chosen query tokens alone, over the same sequences.

    Layers behind the last one that writes keys and values of its own (`kv_sharing_target_layer_name`) feed nothing
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
        raise InvalidInput(
            f"logits_indices must rise strictly within 0..{tokens - 1}; they begin with {indices[:4].tolist()} and end "
            f"with {indices[-1]}."
        )
    ends = metadata.query_start_loc[1 : reqs + 1]
    row = np.searchsorted(ends, indices, side="right")
    counts = np.bincount(row, minlength=reqs)
    last = ends[row] - indices <= counts[row]
    if (counts == 0).any() or not last.all():
        index = int(np.argmin(counts)) if (counts == 0).any() else int(row[np.argmin(last)])
        raise InvalidInput(
            f"logits_indices do not choose the last tokens of row {index} ({counts[index]} chosen); every sequence "
            "needs at least its last token, and no gaps."
        )
    return replace(
        metadata,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=metadata.seq_lens[:reqs],
        block_tables=metadata.block_tables[:reqs],
        slot_mapping=metadata.slot_mapping[indices],
        positions=metadata.positions[indices],
        num_actual_tokens=int(indices.size),
        max_query_len=int(counts.max(initial=0)),
        packed=None,
        layout=None,
    )
