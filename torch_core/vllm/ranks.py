"""Ranks that share sequences: their collectives, their shares of cached tokens, and their shares of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_core.attention.context_parallel import merge_parts
from torch_core.base.errors import InvalidInput, Unsupported
from torch_core.metadata import CommonAttentionMetadata, get_dcp_local_seq_lens, get_dcp_local_slots
from torch_core.vllm.types import ContextGroup, ContextParallel


class DistributedGroup:
    """A `ContextGroup` over `torch.distributed`: NCCL on CUDA, gloo on a CPU.

    Args:
        group: a process group; None for all processes.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `ContextGroup.all_gather`."""
        found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(found, tensor.contiguous(), group=self._group)
        return torch.cat(found, dim)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """See `ContextGroup.all_to_all`."""
        found = torch.empty_like(tensor)
        torch.distributed.all_to_all_single(found, tensor.contiguous(), group=self._group)
        return found


def merge_over_group(
    out: Tensor, lse: Tensor, group: ContextGroup, world_size: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention to each rank's keys by one all-to-all, which sends a head's parts to the rank that has it.

    `out` is [num_tokens, world_size * num_heads, head_size], of this rank's keys, `lse` float32 without the last axis,
    and `sinks` [num_heads], of this rank's heads; so are the merged output and lse, in float32.
    """
    parts = [x.unflatten(1, (world_size, -1)).movedim(1, 0).contiguous() for x in (out, lse)]
    size = out.shape[-1] * out.element_size()
    message = torch.cat([parts[0].view(torch.uint8), parts[1][..., None].view(torch.uint8)], -1)
    found = group.all_to_all(message)
    outs, lses = found[..., :size].contiguous().view(out.dtype), found[..., size:].contiguous().view(lse.dtype)
    return merge_parts(outs, lses[..., 0], sinks, library=torch)


class RankArrays:
    """Derives them; for arrays that a captured step was built from, always into the memory that the step reads.

    A graph holds addresses, and its replay does not derive the arrays again: call `build` with the same arrays before
    each replay, as vLLM's runner fills its persistent buffers.

    Args:
        place: the ranks that share sequences.
        block_size: number of tokens of a rank's blocks; the batch's are as many times larger as there are ranks.
    """

    def __init__(self, place: ContextParallel, block_size: int) -> None:
        self._place, self._block_size = place, block_size
        self._captured: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns int32 `[num_seqs]` and `[num_tokens]`: lengths, and slots of which others' are PAD_SLOT_ID."""
        derived = self._derived(arrays)
        kept = self._captured.get(_key(arrays))
        if kept is None:
            return derived
        for old, new in zip(kept, derived, strict=True):
            old.copy_(new)
        return kept

    def keep(self, arrays: Mapping[str, Tensor] | None) -> None:
        """Keeps the memory of the arrays that are derived from these, for a captured step; they must be given."""
        if arrays is None:
            wanted = (
                f"over {self._place.total_cp_world_size} ranks a captured step reads lengths and slots that build "
                "derives from the batch's. Give the arrays of StepBuffers here, and to build before each replay"
            )
            raise InvalidInput("arrays", value=None, wanted=wanted)
        self._captured.setdefault(_key(arrays), self._derived(arrays))

    def _derived(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        place = self._place.dcp_place
        slots = get_dcp_local_slots(arrays["slot_mapping"], block_size=self._block_size, **place)
        return get_dcp_local_seq_lens(arrays["seq_lens"], **place), slots


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
        wanted = (
            f"where the tokens of prompts are split over {pcp_world_size} ranks, a step has whole prompts of a "
            f"multiple of {2 * pcp_world_size} tokens, or one token for each row. Pad prompts, and keep chunks and "
            "decodes apart"
        )
        raise Unsupported("num_new_tokens", f"of row {row} is {lens[row]} of {common.seq_lens[row]} tokens", wanted)
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


def _key(arrays: Mapping[str, Tensor]) -> tuple[int, ...]:
    lens, slots = arrays["seq_lens"], arrays["slot_mapping"]
    return lens.data_ptr(), slots.data_ptr(), len(lens), len(slots)
