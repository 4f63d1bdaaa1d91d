"""Attention over keys and values that lie packed in memory: encoders, cross attention, prefill without a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_core.calls import DenseCall, check_values
from torch_core.errors import InvalidInput
from torch_core.reference.sequence import attend, empty_results, on_the_host, store_output

__all__ = ["attention"]


def attention(call: DenseCall[Tensor], *, compute_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attends sequences of unequal length that are packed one after the other.

    Sequence `s` owns query rows `query_start_loc[s]:query_start_loc[s + 1]` and key rows
    `key_start_loc[s]:key_start_loc[s + 1]`. The two lengths may differ (cross attention, a query against a longer
    past); the mask is aligned bottom-right, as in `AttentionSpec`.

    Args:
        call: the call.
        compute_dtype: as in `paged_attention`.

    Returns:
        The output and the lse; padding rows give zeros and -inf. See `torch_core.reference.sequence`.

    Raises:
        InvalidInput: offsets that fall, that do not start at 0, or that exceed their tensor or the stated maximum.

    Example:
        >>> from torch_core.specs import AttentionSpec
        >>> x, starts = torch.ones(3, 1, 2), torch.tensor([0, 3])
        >>> call = DenseCall(query=x, key=x, value=x, query_start_loc=starts, key_start_loc=starts,
        ...                  spec=AttentionSpec(scale=0.5), max_query_len=3)
        >>> attention(call)[0].round(decimals=4).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    call = on_the_host(call)
    check_values(call)
    query_starts, key_starts = call.query_start_loc.tolist(), call.key_start_loc.tolist()
    if len(query_starts) != len(key_starts):
        raise InvalidInput(
            f"key_start_loc has {len(key_starts)} entries and query_start_loc {len(query_starts)}; "
            "both need num_seqs + 1."
        )
    output, lse, compute_dtype = empty_results(call, compute_dtype)
    for seq in range(call.num_seqs):
        rows = slice(query_starts[seq], query_starts[seq + 1])
        keys = slice(key_starts[seq], key_starts[seq + 1])
        query, key, value = (x.cpu().to(compute_dtype) for x in (call.query[rows], call.key[keys], call.value[keys]))
        output[rows], lse[rows] = attend(call, seq, query, key, value)
    return store_output(call, output), lse.to(call.query.device)
