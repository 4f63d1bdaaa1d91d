"""Groups of neighbouring sequences that share a prefix: found in a step's block tables, to be attended once each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_core.metadata.cascade import CascadeCosts, cascade_pays
from torch_core.metadata.common import CommonAttentionMetadata

__all__ = ["PrefixGroups", "prefix_groups"]


class PrefixGroups(NamedTuple):
    """The shared prefixes of a decode step.

    Attributes:
        prefix_lens: int32[reqs], tokens that a sequence shares with its group, whole blocks; 0 outside of groups.
        piece_starts: the first sequence of each piece and, at the end, their number: the sequences of a piece are of
            one group, or of none, and attend to their prefix as one.
    """

    prefix_lens: np.ndarray
    piece_starts: list[int]

    def pays(
        self, *, num_query_heads: int, num_kv_heads: int, head_size: int, bytes_per_element: float, num_sms: int
    ) -> bool:
        """Returns whether attending each prefix once should be faster; see `use_cascade_attention`."""
        read_once = int(self.prefix_lens[self.piece_starts[:-1]].sum())
        return cascade_pays(
            int(self.prefix_lens.sum()),
            read_once,
            len(self.prefix_lens),
            int(self.prefix_lens.sum()),
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            bytes_per_element=bytes_per_element,
            num_sms=num_sms,
            costs=CascadeCosts(),
        )


def prefix_groups(metadata: CommonAttentionMetadata, *, piece_tokens: int, max_pieces: int) -> PrefixGroups | None:
    """Finds neighbouring sequences whose tables begin with the same blocks.

    Args:
        metadata: metadata of a step with one new token for each sequence.
        piece_tokens: most sequences of a piece.
        max_pieces: most pieces.

    Returns:
        The groups; None without groups, or with more than `max_pieces`.

    Example:
        >>> from torch_core.metadata import SequenceRow, build_common_metadata
        >>> rows = [SequenceRow([1, 2, 3], 9, 1), SequenceRow([1, 2, 4], 8, 1), SequenceRow([5], 1, 1)]
        >>> found = prefix_groups(build_common_metadata(rows, block_size=4, num_blocks=8), piece_tokens=4, max_pieces=4)
        >>> found.prefix_lens.tolist(), found.piece_starts
        ([8, 8, 0], [0, 2, 3])
    """
    reqs, block_size = metadata.num_reqs, metadata.block_size
    tables = metadata.block_tables[:reqs]
    if reqs < 2 or not (tables[1:, 0] == tables[:-1, 0]).any():
        return None
    full = metadata.compute_num_computed_tokens()[:reqs] // block_size
    alike = tables[1:] == tables[:-1]
    shared = np.where(alike.all(1), tables.shape[1], alike.argmin(1))
    groups = _grouped(np.minimum(shared, np.minimum(full[1:], full[:-1])).tolist())
    prefix_lens, starts = np.zeros(reqs, np.int32), []
    for first, end, blocks in groups:
        prefix_lens[first:end] = blocks * block_size
        starts += range(first, end, piece_tokens)
    if len(starts) > max_pieces or not prefix_lens.any():
        return None
    return PrefixGroups(prefix_lens, [*starts, reqs])


def _grouped(shared: list[int]) -> list[tuple[int, int, int]]:
    """Returns (first, end, blocks) of groups and of the sequences between, from the blocks that neighbours share."""
    groups: list[tuple[int, int, int]] = []
    first, blocks = 0, 0
    for index, common in enumerate(shared):
        # A neighbour that shares less than half of the prefix would cost the group more than it brings.
        if blocks and 2 * common >= blocks:
            blocks = min(blocks, common)
        elif blocks:
            groups.append((first, index + 1, blocks))
            first, blocks = index + 1, 0
        elif common:
            groups += [(first, index, 0)] if index > first else []
            first, blocks = index, common
    return [*groups, (first, len(shared) + 1, blocks)]
