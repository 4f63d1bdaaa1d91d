"""The lengths and slots of one rank's part of each sequence, which builders derive from a batch on the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torch_core.base.errors import InvalidInput
from torch_core.metadata import get_dcp_local_seq_lens, get_dcp_local_slots
from torch_core.vllm.types import ContextParallel

__all__ = ["RankArrays"]


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
        """Keeps the memory of the arrays that are derived from these, for a captured step.

        Raises:
            InvalidInput: the arrays are missing, so they could not be filled before a replay.
        """
        if arrays is None:
            raise InvalidInput(
                f"arrays is None; over {self._place.total_cp_world_size} ranks a captured step reads lengths and slots "
                "that build derives from the batch's. Give the arrays of StepBuffers here, and to build before each "
                "replay."
            )
        self._captured.setdefault(_key(arrays), self._derived(arrays))

    def _derived(self, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        place = self._place.dcp_place
        slots = get_dcp_local_slots(arrays["slot_mapping"], block_size=self._block_size, **place)
        return get_dcp_local_seq_lens(arrays["seq_lens"], **place), slots


def _key(arrays: Mapping[str, Tensor]) -> tuple[int, ...]:
    lens, slots = arrays["seq_lens"], arrays["slot_mapping"]
    return lens.data_ptr(), slots.data_ptr(), len(lens), len(slots)
