"""Decode context parallelism: the rank of each token of a sequence, and its slot there.

A block of the tables is a block on every rank: of `block_size * dcp_world_size` tokens of a sequence each rank keeps
`block_size` in its own block of that id. So tables, ids and lengths are the same on all ranks, and a batch is built
once, as if blocks were that large. vLLM lays caches out so (`vllm/v1/worker/block_table.py`).
"""

from __future__ import annotations

from typing import Any

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput


def get_dcp_local_seq_lens(seq_lens: Any, *, dcp_world_size: int, dcp_rank: Any, interleave_size: int = 1) -> Any:
    """Returns how many of each sequence's tokens this rank holds, in the type of `seq_lens`.

    Tokens are distributed in runs: token t is on rank `t // interleave_size % dcp_world_size`.

    Args:
        seq_lens: int32[S], a numpy array, a JAX array or a torch tensor on any device.
        dcp_world_size, dcp_rank: ranks, and this one; the rank may be a traced JAX scalar.
        interleave_size: tokens of a run.

    Raises:
        InvalidInput: a size or the rank is out of range.

    Example:
        >>> import numpy as np
        >>> get_dcp_local_seq_lens(np.array([7]), dcp_world_size=2, dcp_rank=0, interleave_size=2).tolist()
        [4]
    """
    _check_ranks(dcp_world_size, dcp_rank, interleave_size)
    cycle = interleave_size * dcp_world_size
    rest = seq_lens % cycle - dcp_rank * interleave_size
    return seq_lens // cycle * interleave_size + rest.clip(0, interleave_size)


def get_dcp_local_slots(
    slot_mapping: Any, *, block_size: int, dcp_world_size: int, dcp_rank: Any, interleave_size: int = 1
) -> Any:
    """Returns int32[T]: the slots of this rank's tokens, PAD_SLOT_ID for the others.

    Args:
        slot_mapping: int32[T], slots of blocks of `block_size * dcp_world_size` tokens, of any array library; negative
            ones stay.
        block_size: tokens of a block on one rank, a multiple of `interleave_size`.
        dcp_world_size, dcp_rank, interleave_size: as in `get_dcp_local_seq_lens`.

    Raises:
        InvalidInput: a size or the rank is out of range, or runs do not fill blocks.

    Example:
        >>> import numpy as np
        >>> slots = np.array([8, 9, 10, 11, -1], np.int32)
        >>> get_dcp_local_slots(slots, block_size=2, dcp_world_size=2, dcp_rank=1).tolist()
        [-1, 4, -1, 5, -1]
    """
    _check_ranks(dcp_world_size, dcp_rank, interleave_size)
    if block_size % interleave_size:
        wanted = f"it must divide the block size, {block_size}"
        raise InvalidInput("interleave_size", value=interleave_size, wanted=wanted)
    # Blocks hold whole cycles, so slots are distributed like positions.
    place = {"dcp_world_size": dcp_world_size, "dcp_rank": dcp_rank, "interleave_size": interleave_size}
    local = get_dcp_local_seq_lens(slot_mapping, **place)
    mine = (slot_mapping >= 0) & (slot_mapping // interleave_size % dcp_world_size == dcp_rank)
    return (local + 1) * mine - 1


def _check_ranks(dcp_world_size: int, dcp_rank: Any, interleave_size: int) -> None:
    check_int("dcp_world_size", dcp_world_size, 1)
    check_int("interleave_size", interleave_size, 1)
    # A traced rank has no value.
    if not hasattr(dcp_rank, "dtype"):
        check_int("dcp_rank", dcp_rank, 0, dcp_world_size - 1)
