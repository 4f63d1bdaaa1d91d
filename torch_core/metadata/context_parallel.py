"""Decode context parallelism: the rank of each token of a sequence, and its slot there.

A block of the tables is a block on every rank: of `block_size * dcp_world_size` tokens of a sequence each rank keeps
`block_size` in its own block of that id. So tables, ids and lengths are the same on all ranks, and a batch is built
once, as if blocks were that large. vLLM lays caches out so (`vllm/v1/worker/block_table.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_core.base.checks import check_int
from torch_core.base.errors import InvalidInput
from torch_core.metadata.common import CommonAttentionMetadata


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


def make_dcp_common_attn_metadata(
    metadata: CommonAttentionMetadata, *, dcp_world_size: int, dcp_rank: int, interleave_size: int = 1
) -> CommonAttentionMetadata:
    """Returns the batch as one rank sees it: its own slots and lengths, blocks of its own size, the same tables.

    Args:
        metadata: built with a block size of `dcp_world_size` times a rank's; `seq_lens` stay the whole sequences'.
        dcp_world_size, dcp_rank, interleave_size: as in `get_dcp_local_slots`.

    Raises:
        InvalidInput: a size or the rank is out of range, or the block size is no multiple of the ranks and runs.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> step = build_common_metadata([SequenceRow([5, 2], 7, 2)], block_size=8, num_blocks=8)
        >>> mine = make_dcp_common_attn_metadata(step, dcp_world_size=2, dcp_rank=0)
        >>> mine.slot_mapping.tolist(), mine.dcp_local_seq_lens.tolist(), mine.block_size
        ([-1, 8], [5], 4)
    """
    place = {"dcp_world_size": dcp_world_size, "dcp_rank": dcp_rank, "interleave_size": interleave_size}
    _check_ranks(**place)
    if metadata.block_size % dcp_world_size:
        wanted = (
            f"{dcp_world_size} ranks share a block, so it must be a multiple. Build it with block_size = "
            "dcp_world_size * a rank's block size"
        )
        raise InvalidInput("block_size", f"of the metadata is {metadata.block_size}", wanted)
    block_size = metadata.block_size // dcp_world_size
    return replace(
        metadata,
        slot_mapping=get_dcp_local_slots(metadata.slot_mapping, block_size=block_size, **place),
        dcp_local_seq_lens=get_dcp_local_seq_lens(metadata.seq_lens, **place),
        block_size=block_size,
        packed=None,
        layout=None,
    )


def _check_ranks(dcp_world_size: int, dcp_rank: Any, interleave_size: int) -> None:
    check_int("dcp_world_size", dcp_world_size, 1)
    check_int("interleave_size", interleave_size, 1)
    # A traced rank has no value.
    if not hasattr(dcp_rank, "dtype"):
        check_int("dcp_rank", dcp_rank, 0, dcp_world_size - 1)
