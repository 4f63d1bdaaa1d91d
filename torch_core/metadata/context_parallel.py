"""Decode context parallelism: which tokens of a sequence live on which rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_core.checks import check_int
from torch_core.specs import PAD_SLOT_ID

__all__ = ["get_dcp_local_seq_lens", "mask_slots_of_other_ranks"]


def get_dcp_local_seq_lens(seq_lens: Any, *, dcp_world_size: int, dcp_rank: int, interleave_size: int = 1) -> Any:
    """Returns how many of each sequence's tokens this rank holds, in the type of `seq_lens`.

    Tokens are dealt out in runs: token t lives on rank `t // interleave_size % dcp_world_size`.

    Args:
        seq_lens: int32[S], a numpy array or a torch tensor on any device.
        dcp_world_size, dcp_rank: ranks, and this one.
        interleave_size: tokens of a run.

    Raises:
        InvalidInput: a size or the rank is out of range.

    Example:
        >>> get_dcp_local_seq_lens(np.array([7]), dcp_world_size=2, dcp_rank=0, interleave_size=2).tolist()
        [4]
    """
    _check_ranks(dcp_world_size, dcp_rank, interleave_size)
    cycle = interleave_size * dcp_world_size
    rest = seq_lens % cycle - dcp_rank * interleave_size
    return seq_lens // cycle * interleave_size + rest.clip(0, interleave_size)


def mask_slots_of_other_ranks(
    slot_mapping: np.ndarray, positions: np.ndarray, *, dcp_world_size: int, dcp_rank: int, interleave_size: int = 1
) -> np.ndarray:
    """Returns int32[T]: the slots of the tokens that live on this rank, PAD_SLOT_ID for the others.

    Args:
        slot_mapping: int32[T], each token's slot on whichever rank it lives.
        positions: int32[T], its position in the sequence.
        dcp_world_size, dcp_rank, interleave_size: as in `get_dcp_local_seq_lens`.
    """
    _check_ranks(dcp_world_size, dcp_rank, interleave_size)
    mine = positions // interleave_size % dcp_world_size == dcp_rank
    return np.where(mine, slot_mapping, np.int32(PAD_SLOT_ID))


def _check_ranks(dcp_world_size: int, dcp_rank: int, interleave_size: int) -> None:
    check_int("dcp_world_size", dcp_world_size, 1)
    check_int("interleave_size", interleave_size, 1)
    check_int("dcp_rank", dcp_rank, 0, dcp_world_size - 1)
