"""The metadata of a batch without a cache: encoders, and prompts whose keys are not kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_core.base.errors import InvalidInput, RequestTooLong
from torch_core.base.specs import PAD_SLOT_ID
from torch_core.metadata.common import CommonAttentionMetadata
from torch_core.metadata.layout import metadata_layout
from torch_core.metadata.slots import compute_positions

__all__ = ["build_dense_metadata"]


def build_dense_metadata(
    query_lens: Sequence[int], *, num_seqs: int | None = None, num_tokens: int | None = None, causal: bool = False
) -> CommonAttentionMetadata:
    """Returns the metadata of sequences that attend to their own tokens of this step only; nothing is written.

    Args:
        query_lens: tokens of each sequence, at least 1.
        num_seqs: padded number of sequences; None for none.
        num_tokens: padded number of tokens; None for none.
        causal: recorded as it is.

    Raises:
        InvalidInput: a length is not positive.
        RequestTooLong: the sequences do not fit in the padded sizes.

    Example:
        >>> build_dense_metadata([3, 2], num_tokens=8).query_start_loc.tolist()
        [0, 3, 5]
    """
    lens = np.array(query_lens, np.int64)
    if lens.size and lens.min() < 1:
        index = int(np.argmin(lens))
        raise InvalidInput(f"query_lens[{index}]", value=lens[index], wanted="it must be at least 1")
    total = int(lens.sum())
    num_seqs = lens.size if num_seqs is None else num_seqs
    num_tokens = total if num_tokens is None else num_tokens
    if lens.size > num_seqs or total > num_tokens:
        raise RequestTooLong(
            f"the batch has {lens.size} sequences of {total} tokens; it is padded to {num_seqs} and {num_tokens}. Pad "
            "to a larger bucket."
        )
    layout = metadata_layout(num_seqs=num_seqs, num_tokens=num_tokens, max_blocks=0)
    buffer = np.zeros(layout.num_elements, np.int32)
    fields = layout.unpack(buffer)
    fields["query_start_loc"][1 : lens.size + 1] = np.cumsum(lens)
    fields["query_start_loc"][lens.size + 1 :] = total
    fields["seq_lens"][: lens.size] = lens
    fields["slot_mapping"][:] = PAD_SLOT_ID
    fields["positions"][:total] = compute_positions(fields["query_start_loc"], np.zeros(num_seqs, np.int32))
    longest = int(lens.max(initial=0))
    return CommonAttentionMetadata(
        **fields,
        num_reqs=lens.size,
        num_actual_tokens=total,
        max_query_len=longest,
        max_seq_len=longest,
        block_size=1,
        num_blocks=1,
        causal=causal,
        packed=buffer,
        layout=layout,
    )
