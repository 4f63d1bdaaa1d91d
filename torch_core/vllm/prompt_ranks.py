"""Prefill context parallelism: the tokens of prompts are split over ranks, which gather keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_core.base.errors import Unsupported
from torch_core.metadata import CommonAttentionMetadata

__all__ = ["PromptShare", "prompt_share"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptShare:
    """One rank's part of a batch of prompts. Tensors are on the device.

    Each prompt is split into two chunks for every rank, and a rank has one from the front and its mirror image from the
    back: under the causal mask all have the same work. vLLM orders tokens so (`DualChunkSwap`).

    Attributes:
        token_indices: int64 [own tokens]; which tokens of the batch this rank's queries, keys and values are.
        pcp_allgather_restore_idx: int64 [tokens]; where in the ranks' tokens, one rank after the other, each token is.
        key_rows: int64; for each of this rank's chunks all tokens of its prompt up to the chunk's end.
        query_start_loc, key_start_loc: int32 [2 * prompts + 1]; this rank's chunks, and their keys, as sequences.
        max_query_len, max_key_len: the longest of them.
    """

    token_indices: Tensor
    pcp_allgather_restore_idx: Tensor
    key_rows: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    max_query_len: int
    max_key_len: int


def prompt_share(
    common: CommonAttentionMetadata, *, pcp_world_size: int, pcp_rank: int, device: torch.device
) -> PromptShare:
    """Returns one rank's share of a batch of whole prompts.

    Raises:
        Unsupported: a row with a context, or one that does not fall into two equal chunks for each rank.
    """
    starts, lens = common.query_start_loc[: common.num_reqs].astype(np.int64), common.query_lens[: common.num_reqs]
    bad = (common.seq_lens[: common.num_reqs] != lens) | (lens % (2 * pcp_world_size) != 0)
    if bad.any():
        row = int(bad.argmax())
        raise Unsupported(
            f"row {row} has {lens[row]} new tokens of {common.seq_lens[row]}; where the tokens of prompts are split "
            f"over {pcp_world_size} ranks, a step has whole prompts of a multiple of {2 * pcp_world_size} tokens, or "
            "one token for each row. Pad prompts, and keep chunks and decodes apart."
        )
    chunks = lens // (2 * pcp_world_size)

    def rows_of(rank: int) -> np.ndarray:
        own = [
            start + number * chunk + np.arange(chunk)
            for start, chunk in zip(starts, chunks, strict=True)
            for number in (rank, 2 * pcp_world_size - 1 - rank)
        ]
        return np.concatenate(own)

    order = np.concatenate([rows_of(rank) for rank in range(pcp_world_size)])
    ends = np.stack([(pcp_rank + 1) * chunks, (2 * pcp_world_size - pcp_rank) * chunks], 1).reshape(-1)
    keys = [start + np.arange(end) for start, end in zip(starts.repeat(2), ends, strict=True)]
    arrays = {
        "token_indices": rows_of(pcp_rank),
        "pcp_allgather_restore_idx": np.argsort(order),
        "key_rows": np.concatenate(keys),
        "query_start_loc": np.concatenate([[0], np.cumsum(chunks.repeat(2))]).astype(np.int32),
        "key_start_loc": np.concatenate([[0], np.cumsum(ends)]).astype(np.int32),
    }
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return PromptShare(**tensors, max_query_len=int(chunks.max()), max_key_len=int(ends.max()))
